// Every operator in torch's own operators, which torch differentiates. Kernels are a faster way to the same: where no
// kernel computes a derivative, or a device has no kernels, the definition does.
#pragma once

#include <vector>

#include "call.h"

namespace rope {

// Returns the results of a checked call of an operator that rotates, or of _norm_rotate_qk_backward. `in_place` and
// caches make no difference: the results are those of q, k and v, not quantised, which belong into `out`.
std::vector<Tensor> define(const Call& call);

// Writes these results to `out` of each side: to the cells of a cache, and quantised.
void write(const Call& call, const std::vector<Tensor>& results);

// Writes cos and sin.
void define_cos_sin(const Call& call);

}  // namespace rope
