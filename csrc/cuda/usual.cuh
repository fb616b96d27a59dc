// What the kernels of usual calls share: a token with its angles and its cell, and the chunk of a head. A thread block
// takes heads of one side: of q, of k or of v.
#pragma once

#include "norm.cuh"
#include "quantise.cuh"

namespace rope::cuda {

// What a kernel is compiled for.
enum Features : int {
  kFrequencies = 1,  // the angles come from inv_freq, and not from tables
  kCache = 2,        // k and v may go to caches
  kNorm = 4,         // heads may be normalised
  kBytes = 8,        // results may be quantised
  kEager = 16,       // eager rounding
  kBackward = 32,    // rotates back. The arguments say where the angles come from, and each thread computes its own
};
template <typename Shape, int features>
struct Usual : Shape {
  static constexpr bool shares_angles = features & kFrequencies, cache = features & kCache, norm = features & kNorm,
                        bytes = features & kBytes, eager = features & kEager, backward = features & kBackward,
                        plain = !(cache || norm);

  ROPE_FN static bool frequencies(const UsualArgs& a) { return backward ? a.frequencies : shares_angles; }
};

ROPE_FN int64_t offset_of(const int* strides, int i, int j) {
  return int64_t(i) * strides[0] + int64_t(j) * strides[1];
}

// Returns the chunk of each head that a thread takes, which is the last one if there is none for it. Its channels count
// in vectors.
using UsualChunk = Chunk<1, int>;
ROPE_FN UsualChunk chunk_at(const UsualArgs& a, int index) {
  return chunk_of<1, int>(min(index, a.chunks - 1), a.half, a.chunks, a.start, a.others, false, false, INT32_MAX);
}

// n adjacent numbers of type T, or of float32 if `wide`, as they are in memory: no thread waits for them before it
// needs them.
template <typename T, int n>
struct Held {
  uint32_t words[n];

  ROPE_FN void read(const char* from, bool wide) {
    sizeof(T) == 4 || wide ? read_words<n>(from) : read_words<n * sizeof(T) / 4>(from);
  }
  template <bool wide>
  ROPE_FN void numbers(float* to) const {
    for (int i = 0; i < n; i++) {
      if constexpr (sizeof(T) == 4 || wide) {
        to[i] = __uint_as_float(words[i]);
      } else {
        const float2 two = unpack(T(), words[i / 2]);
        to[i] = i % 2 ? two.y : two.x;
      }
    }
  }

 private:
  template <int count>
  ROPE_FN void read_words(const char* from) {
    constexpr int m = count < 4 ? count : 4;
    for (int i = 0; i < count; i += m) {
      const auto some = reinterpret_cast<const Vector<uint32_t, m>*>(from)[i / m];
      for (int j = 0; j < m; j++) words[i + j] = some.of[j];
    }
  }
};

// The heads of a token in a tensor or a cache, and one chunk of each.
template <typename E, int V>
struct UsualHeads {
  Vector<E, V>* token;  // its head 0
  int stride;
  UsualChunk chunk;

  ROPE_FN UsualHeads(const void* data, const int* strides, int b, int s, const UsualChunk& chunk)
      : token(static_cast<Vector<E, V>*>(const_cast<void*>(data)) + offset_of(strides, b, s)),
        stride(strides[2]),
        chunk(chunk) {}
  ROPE_FN Elements<E, V> read(int head) const {
    return {token[unsigned(head * stride + chunk.at[0])], token[unsigned(head * stride + chunk.at[1])]};
  }
  ROPE_FN void write(int head, const Elements<E, V>& x) const {
    token[unsigned(head * stride + chunk.at[0])] = x.of[0];
    if (is_whole(chunk)) token[unsigned(head * stride + chunk.at[1])] = x.of[1];
  }
};

// A token, and cos and sin of a chunk. The constructor begins to load the position, the slot and the first frequency.
// What needs none of them is loaded before, and used before these are waited for: otherwise nvcc may let an earlier
// load wait for a later one. rotates: cos and sin are used
template <typename K>
struct UsualToken : Token<int> {
  using T = typename K::T;
  static constexpr int V = K::V, runs = Columns<K>::runs, length = Columns<K>::length;
  const UsualArgs& a;
  const UsualChunk& chunk;
  const bool rotates;
  Loaded given_position, given_slot, given_frequency[2];
  Held<T, length> cos[runs], sin[runs];
  CosSin<float, V> angles;  // from wait() on

  ROPE_FN UsualToken(const UsualArgs& a, const UsualChunk& chunk, bool rotates, int b, int s)
      : Token<int>{b, s}, a(a), chunk(chunk), rotates(rotates) {
    if (K::backward) given_position = {};  // or a loop would keep that of the token before
    if (a.positions) given_position = Loaded::read(a.positions, offset_of(a.position_strides, b, s), a.wide_positions);
    if (K::cache && a.slots) given_slot = Loaded::read(a.slots, offset_of(a.slot_strides, b, s), a.wide_slots);
    if (K::shares_angles) frequencies().load(min(first_pair(), a.half * V - 1), given_frequency);
  }

  // Waits for the position, and begins to load cos and sin. Then it waits for the slot, and stops the kernel if one of
  // the two is not allowed. head: the one of the angles, if the table is by head
  ROPE_FN void arrive(int head = 0) {
    const int64_t given = a.positions ? given_position.integer(a.wide_positions) : a.same_position ? 0 : s;
    const bool limited = (!K::frequencies(a) || K::cache) && a.allowed != 0;
    Token<int>::operator=(token_at(b, s, given, a.offset, {limited, int64_t(a.allowed) - 1}));
    if (!K::frequencies(a)) read_row(head);
    if (K::cache && a.slots) {
      const int64_t slot = given_slot.integer(a.wide_slots);
      take_slot(*this, slot, a.cells);
      block = int(slot) >> a.block_shift, in_block = int(slot) - (block << a.block_shift);
    }
    check_token(valid || pad, fits);
  }
  // Begins to load cos and sin of a head from the tables.
  ROPE_FN void read_row(int head) {
    const int64_t at = int64_t(b) * a.table_strides[0] + int64_t(head) * a.table_head_stride,
                  row = int64_t(row_of(*this, !a.by_token)) * a.table_strides[1];
    read_columns(a.cos, a.sin, at, row, a.wide_angles);
  }

  // Arrives, and computes cos and sin of the tokens of the thread block, of which each thread takes some pairs of its
  // own token. All threads call this together. threads: the most of a thread block
  template <int threads>
  ROPE_FN void share_angles() {
    __shared__ float shared[2][threads * V];
    const int pairs = a.half * V, first = int(threadIdx.z) * pairs;
    __syncwarp();
    arrive();
    for (int pair = first_pair(); pair < pairs;) {
      float turns, more;
      frequencies().take(given_frequency, turns, more);
      CosSin<float, 1> angle;
      cos_sin_of(angle_of(double(position), turns, more), angle.cos[0], angle.sin[0]);
      Factor<float>{a.factor_hi, a.factor_lo}.scale(angle);
      shared[0][first + pair] = angle.cos[0];
      shared[1][first + pair] = K::plain && a.inverse ? -angle.sin[0] : angle.sin[0];
      pair += int(blockDim.x * blockDim.y);
      if (pair < pairs) frequencies().load(pair, given_frequency);
    }
    __syncthreads();
    read_columns(shared[0], shared[1], 4 * first, 0, true);
  }

  // Waits for cos and sin.
  ROPE_FN void wait() {
    if (K::backward && a.frequencies) {
      const Columns<K> columns(chunk.index, a.half * V);
      if (rotates) columns.read(frequencies(), angles), turn(angles, position);
    } else {
      K::shares_angles || a.wide_angles ? take<true>() : take<false>();
    }
    // Only without a norm and a cache a table has a factor, and a forward is inverse. Threads share angles that have
    // both.
    if (K::plain && K::eager) {
      if (a.factor_hi != 1.0f) eagerly().scale(angles, [&](float x) { return x * a.factor_hi; });
    } else if ((K::plain && !K::shares_angles) || (K::backward && a.frequencies)) {
      Factor<float>{a.factor_hi, a.factor_lo}.scale(angles);
    }
    if (K::backward || (K::plain && !K::shares_angles && a.inverse)) {
      for (float& sin : angles.sin) sin = -sin;
    }
    for (int i = 0; i < V && K::cache && !valid; i++) angles.cos[i] = angles.sin[i] = NAN;  // a pad
  }
  ROPE_FN void rotate(Numbers<float, V>& numbers) const {
    if (K::eager) return eagerly().template rotate<K::interleaved>(numbers, angles);
    cuda::rotate<K::interleaved>(numbers, angles);
  }

 private:
  // Begins to load the columns of the chunk in a row. at, row: the sum of both is where the row begins, in bytes
  ROPE_FN void read_columns(const void* cosines, const void* sines, int64_t at, int64_t row, bool wide) {
    const Columns<K> columns(chunk.index, a.half * V);
    const int size = wide ? 4 : int(sizeof(T)), first = int(columns.first) * size;
    for (int run = 0; run < runs && rotates; run++) {
      const int64_t begin = at + first + run * int(columns.distance) * size;
      cos[run].read(static_cast<const char*>(cosines) + begin + row, wide);
      sin[run].read(static_cast<const char*>(sines) + begin + row, wide);
    }
  }
  template <bool wide>
  ROPE_FN void take() {
    for (int run = 0; run < runs; run++) {
      cos[run].template numbers<wide>(angles.cos + run * length);
      sin[run].template numbers<wide>(angles.sin + run * length);
    }
  }
  ROPE_FN Frequencies frequencies() const { return {a.cos, bool(a.wide_angles), bool(a.split), a.table_strides[1], 1}; }
  ROPE_FN static int first_pair() { return int(threadIdx.y * blockDim.x + threadIdx.x); }
  ROPE_FN Eagerly<T> eagerly() const { return {bool(a.narrow)}; }
};

// The weights of a chunk.
template <typename T, int V>
struct Weights {
  Held<T, V> of[2];

  Weights() = default;
  ROPE_FN Weights(const UsualArgs& a, const UsualSide& side, const UsualChunk& chunk, int head) {
    for (int k = 0; k < 2; k++) {
      const int64_t at = int64_t(head) * a.weight_stride + chunk.at[k] * V;
      of[k].read(static_cast<const char*>(side.weight) + at * (a.wide_weights ? 4 : sizeof(T)), a.wide_weights);
    }
  }
  // by_block: a thread block takes a group. Then weights have no offset.
  template <bool by_block>
  ROPE_FN Numbers<float, V> numbers(const UsualArgs& a, const UsualSide& side) const {
    Numbers<float, V> n;
    const auto take = [&](auto wide) {
      for (int k = 0; k < 2; k++) of[k].template numbers<decltype(wide)::value>(n.of + k * V);
    };
    a.wide_weights ? take(std::true_type()) : take(std::false_type());
    for (int i = 0; i < 2 * V && !by_block; i++) n.of[i] += side.weight_offset;
    return n;
  }
};

// Returns the numbers of a chunk, normalised if its side has a norm. x: is rounded if the norm is
template <typename K>
ROPE_FN auto normalised(const UsualArgs& a, const UsualSide& side, Elements<typename K::T, K::V>& x, float squares,
                        const Numbers<float, K::V>& weights) {
  auto numbers = numbers_of(x);
  if (!K::norm || !side.norm) return numbers;
  const float root = inverse_root(fma(squares, side.per_channel, a.norm_eps));
  const auto round = [&] { numbers = numbers_of(x = rounded<typename K::T, K::V>(numbers)); };
  for (float& number : numbers.of) number *= root;
  if (K::eager && a.round_before_weight) round();
  if (side.weight) numbers = product_of(numbers, weights);
  if (K::eager) round();
  return numbers;
}

// Where a thread writes the heads of its side.
template <typename K>
struct UsualResult {
  using T = typename K::T;
  static constexpr int V = K::V;
  const UsualSide& side;
  const float* scales;  // of results in 8 bits
  const UsualToken<K>& token;
  const bool to_cell = K::cache && side.is_cache, is_written = !(to_cell && token.pad);
  const int block = to_cell ? token.block : token.b, row = to_cell ? token.in_block : token.s;
  const UsualHeads<T, V> plain{side.out, side.out_strides, block, row, token.chunk};
  const UsualHeads<uint8_t, V> bytes{side.out, side.out_strides, block, row, token.chunk};

  // Rotates the chunk of a head, and writes it. x: what it is if it is neither rotated nor normalised
  ROPE_FN void write(int head, Elements<T, V>& x, Numbers<float, V>& numbers) const {
    if (token.rotates) token.rotate(numbers);
    if (token.rotates || (K::norm && side.norm)) x = rounded<T, V>(numbers);
    if (K::bytes && side.format) {
      bytes.write(head, quantised_to(side.format, numbers, scales[side.scale_by_head ? head : 0]));
    } else {
      plain.write(head, x);
    }
  }
};

}  // namespace rope::cuda
