// Whether strided tensors share memory, exactly: slices of one packed tensor interleave and are still apart.
#pragma once

#include <ATen/core/Tensor.h>

namespace rope {

// The same element at two different indices. False where a size or stride is symbolic: the real kernel looks again.
bool overlaps_itself(const at::Tensor& t);

// A byte in common.
bool overlap(const at::Tensor& a, const at::Tensor& b);

}  // namespace rope
