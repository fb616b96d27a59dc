// The launch plan of the backward of norm and rotation. It writes a gradient for every channel. The gradients of the
// weights are sums over all tokens and heads. A thread block computes one part of such a sum, for consecutive tokens of
// q or of k, and writes a sum for each weight. A second kernel adds up the parts. A part of q has about as many heads
// as one of k. The parts follow from sizes alone, so that every launch of a call gives the same bits.
#pragma once

#include "rotate_plan.h"

namespace rope::cuda {

// An H100 takes all parts at a time: each of its multiprocessors holds so many threads of these kernels.
constexpr rope_int kHeldThreads = 384, kMultiprocessors = 132;
constexpr rope_int kTokensOfPart = 8;       // the least of a norm over all heads: a part writes a sum for each channel
constexpr int kBackwardGroupThreads = 224;  // the most that take a group
// A thread block that adds up parts has kSumChannels x kSumTeams threads.
constexpr int kSumChannels = 16, kSumTeams = 32;

// The arguments of a usual kernel. The inputs of `rotate` are the gradients of the results; those of x are the q and k
// that the forward call normalised.
struct UsualBackwardArgs {
  UsualArgs rotate;
  UsualSide x[2];
  Parts parts[2];
  int tokens;
};

inline UsualBackwardArgs pack_backward(const Args& a, const Tiling& t) {
  UsualBackwardArgs n{pack(a, t), {}, {t.parts[kQ], t.parts[kK]}, int(a.seq * a.batch)};
  for (int i = kQ; i <= kK; i++) {
    const Side& side = a.sides[i];
    n.x[i].in = side.before;
    for (int d = 0; d < 3; d++) n.x[i].in_strides[d] = int(stride_of(a, t, i, side.before_strides, false, d));
  }
  return n;
}

inline Plan plan_norm_backward(const Args& a) {
  const Side &q = a.sides[kQ], &k = a.sides[kK];
  Plan plan = plan_head(a, true);
  Tiling& t = plan.tiling;
  const bool all_heads = q.norm == kAllHeads, by_team = !plan.by_block && t.chunks <= kWarp;
  // A wide head that no usual kernel takes has a warp.
  const rope_int x = power_of_two(std::min(t.chunks, kWarp)), teams = by_team ? kThreads / x : 1;
  const rope_int heads = by_team && a.source != kTableByHead ? 2 : 1;  // of a token, for each team
  const rope_int tokens = a.batch * a.seq, most_heads = std::max({q.heads, k.heads, rope_int(1)});
  plan.block = plan.by_block ? group_block(a, t, kBackwardGroupThreads) : Size3{x, teams, 1};
  plan.general = why_general(a, plan);
  const rope_int threads = plan.block.x * plan.block.y;
  const rope_int most_parts = kMultiprocessors * (kHeldThreads / threads) - 1;  // or one more
  // The heads of a part: those of whole tokens, of q and of k.
  rope_int of_part = std::max(all_heads ? kTokensOfPart * most_heads : teams * heads,
                              ceil_div(tokens * (q.heads + k.heads), most_parts));
  of_part = ceil_div(of_part, most_heads) * most_heads;
  for (int i = kQ; i <= kK; i++) {
    const Side& side = a.sides[i];
    Parts& parts = t.parts[i];
    parts = {0, 0, side.head_dim * (all_heads ? side.heads : 1), 1};
    if (side.heads != 0) {
      parts.tokens = ceil_div(of_part, side.heads);
      parts.count = ceil_div(tokens, parts.tokens);
      parts.teams = int(std::min(power_of_two(ceil_div(side.heads, heads)), teams));
    }
    plan.sums += parts.count * parts.channels;
  }
  plan.grid = {t.parts[kQ].count + t.parts[kK].count, 1, 1};
  plan.shared = ((plan.by_block ? kHeldChannels : 2 * t.vector) + 1) * threads * rope_int(sizeof(double));
  return plan;
}

}  // namespace rope::cuda
