// Every operator in torch's own operators, which torch differentiates. Kernels are a faster way to the same: where no
// kernel computes a derivative, or a device has no kernels, the definition does.
#pragma once

#include <vector>

#include "call.h"

namespace rope {

// Returns q times q_factor.
Tensor times_factor(const Tensor& q, Tensor factor);

// Returns what a checked call computes: rotated q and k, and v, before they are quantised; in a backward the gradients
// of q, k and both weights. Writes nothing.
std::vector<Tensor> define(const Call& call);

// Writes these results to `out` of each side, quantised if `out` is, or to the cells of its cache.
void write(const Call& call, const std::vector<Tensor>& results);

// Writes the cos and sin of a call of axial_cos_sin.
void define_cos_sin(const Call& call);

}  // namespace rope
