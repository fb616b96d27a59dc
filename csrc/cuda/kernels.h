// The functions that cuda.cpp calls to launch the kernels. Each returns the error of its launches, if any.
#pragma once

#include <cuda_runtime.h>

#include "plan.h"

namespace rope::cuda {

cudaError_t rotate(const RotateArgs& a, const Plan& plan, cudaStream_t stream);
cudaError_t norm_rotate(const RotateArgs& a, const Plan& plan, cudaStream_t stream);

// sums: [2, plan.sums, head_dim]; its sum over the second dimension is the gradients of q_norm_weight and
// k_norm_weight. If a head takes several steps (see in_one_step()), the kernel adds to the elements of sums, which must
// be zeros.
cudaError_t norm_backward(const NormBackwardArgs& n, const BackwardPlan& plan, double* sums, cudaStream_t stream);

cudaError_t table_backward(const TableBackwardArgs& b, const TablePlan& plan, cudaStream_t stream);

// The positions must be contiguous.
cudaError_t cos_sin(const CosSinArgs& c, cudaStream_t stream);

}  // namespace rope::cuda
