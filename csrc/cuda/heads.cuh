// The heads that a thread reads and writes: a loop over a share of the list of heads, and a v of another shape.
#pragma once

#include "angles.cuh"
#include "quantise.cuh"

namespace rope::cuda {

// A loop over the heads that a team takes of its thread block's share of the list of heads, see plan.h. Team
// threadIdx.y begins with head threadIdx.y of the share and goes on by blockDim.y. The loop is in one side at a time.
template <typename K>
struct Heads {
  using T = typename K::T;
  using A = typename K::A;
  using I = typename K::I;
  static constexpr int V = K::V;
  const RotateArgs& a;
  const Token<K>& token;
  const bool skip_in_place;  // this chunk is not rotated, so sides that are changed in place keep it
  I share_end;               // end of the thread block's share of the list
  int side = kQ;
  I head = 0;             // the next head of the side that the team takes
  I end = 0;              // end of the side's heads in the share
  I out_end = -1;         // end of the heads that are written: 0 if the token is a pad; -1: not located yet
  const T* in = nullptr;  // head 0 of the token
  T* out = nullptr;       // head 0 of the result, which is bytes if it is quantised

  ROPE_FN Heads(const RotateArgs& a, const Token<K>& token, bool skip_in_place)
      : a(a), token(token), skip_in_place(skip_in_place) {
    const I share = I(token.tiling.heads_per_thread_block);
    end = I(blockIdx.y) * share;  // where the share begins: q begins at 0
    share_end = min(end + share, I(token.tiling.starts[kSides]));
    head = end + I(threadIdx.y);
  }

  ROPE_FN const Side& params() const { return a.params.sides[side]; }
  ROPE_FN bool rotates() const { return !K::cache || side != kV; }
  ROPE_FN bool normalises() const { return K::general ? params().norm != kNoNorm : rotates(); }

  // Begins with all heads of a side, whatever the thread block's share is.
  ROPE_FN void take(int which) {
    side = which;
    head = 0;
    end = I(params().heads);
    find_input();
  }

  // Returns the head that this team takes i steps from now.
  ROPE_FN I head_at(int i) const { return head + I(i) * I(blockDim.y); }

  // Goes on by `count` steps, to the next side if this one is done. Returns false if the share is done.
  ROPE_FN bool next(int count) {
    head = head_at(count);
    while (head >= end || (skip_in_place && token.tiling.in_place[side])) {
      // The team's first head past this side. blockDim.y is a power of two.
      const rope_int* starts = token.tiling.starts;
      const I at = I(starts[side]) + end + ((head - end) & (I(blockDim.y) - 1));
      if (at >= share_end) return false;
      side = int(at >= I(starts[kK])) + int(K::cache && at >= I(starts[kV]));
      head = at - I(starts[side]);
      end = min(share_end - I(starts[side]), I(params().heads));
      find_input();
    }
    return true;
  }

  // Returns whether locate() was called since the loop began with this side.
  ROPE_FN bool located() const { return out_end >= 0; }

  // Points `out` at this side's result. Call it after reading and before writing, so that no read waits for the slot.
  ROPE_FN void locate() {
    if (located()) return;
    out_end = end;
    const Side& o = params();
    Cell<I> cell{token.b, token.s};
    if (K::cache && side != kQ && a.params.has_cache) {
      cell = token.cell();
      if (cell.block < 0) out_end = 0;
    }
    const I offset = cell.block * I(o.out[0]) + cell.in_block * I(o.out[1]);
    out = bytes() ? reinterpret_cast<T*>(static_cast<uint8_t*>(a.sides[side].out) + offset)
                  : static_cast<T*>(a.sides[side].out) + offset;
  }

  // Reads the chunk of a head.
  ROPE_FN Elements<T, V> read(I head, const Chunk<I>& c) const {
    return TokenHeads<V, const T, I>{in, params().in, vectors(), last()}.read(head, c);
  }
  // Reads what write() divides the numbers of a head by if it quantises them.
  ROPE_FN A scale(I head) const { return bytes() ? A(a.sides[side].scale[head * params().scale]) : A(1); }
  // Writes the chunk of a head: as elements, or quantised as bytes. If `changes`, it first applies change() to the
  // numbers.
  template <typename F>
  ROPE_FN void write(I head, const Chunk<I>& c, Elements<T, V> x, A scale, bool changes, F&& change) const {
    const auto write_to = [&](auto* to, const auto& elements) {
      TokenHeads<V, std::remove_pointer_t<decltype(to)>, I>{to, params().out, vectors(), last()}.write(head, c,
                                                                                                       elements);
    };
    if (changes || bytes()) {
      auto numbers = numbers_of(x);
      if (changes) change(numbers);
      x = rounded<T, V>(numbers);
      if (bytes()) {
        if (K::eager && a.params.rounding != kOnce) numbers = numbers_of(x);
        return write_to(reinterpret_cast<uint8_t*>(out), quantised_to(params().format, numbers, scale));
      }
    }
    write_to(out, x);
  }

 private:
  ROPE_FN bool bytes() const { return K::general && params().format != kUnquantised; }
  ROPE_FN bool vectors() const { return !K::strided || token.tiling.vectors; }
  ROPE_FN I last() const { return K::strided ? I(params().head_dim) - 1 : kAllChannels<I>; }

  // Points `in` at this side.
  ROPE_FN void find_input() {
    const rope_int* strides = params().in;
    in = static_cast<const T*>(a.sides[side].in) + token.b * I(strides[0]) + token.s * I(strides[1]);
    out_end = -1;
  }
};

// Copies a v that is not in the list of heads, because its head_dim is another one than k's. The thread blocks that
// have no share of the list divide its chunks, which are two neighbouring vectors each, among all threads of a token.
template <typename K>
ROPE_FN void copy_v(const RotateArgs& a, const Token<K>& token) {
  using I = typename K::I;
  Heads<K> heads(a, token, false);
  heads.take(kV);
  heads.locate();
  const I channels = I(heads.params().head_dim), chunks = (channels + 2 * K::V - 1) / (2 * K::V);
  const I threads = I(blockDim.x * blockDim.y), shares = I(token.tiling.shares);
  I i = (I(blockIdx.y) - shares) * threads + threadIdx.y * blockDim.x + threadIdx.x;
  for (; i < heads.out_end * chunks; i += (I(gridDim.y) - shares) * threads) {
    const I head = i / chunks, first = (i - head * chunks) * 2 * K::V, second = first + K::V;
    const Chunk<I> c{{first, second < channels ? second : first}, 0};
    heads.write(head, c, heads.read(head, c), heads.scale(head), false, [](auto&) {});
  }
}

}  // namespace rope::cuda
