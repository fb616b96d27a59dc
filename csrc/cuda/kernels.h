// What the host file asks of the kernel files.
#pragma once

#include <cuda_runtime.h>

#include "plan.h"

namespace rope::cuda {

cudaError_t rotate(const RotateArgs& a, const Plan& plan, cudaStream_t stream);
cudaError_t norm_rotate(const RotateArgs& a, const Plan& plan, cudaStream_t stream);

// sums: [2, plan.sums, head_dim]; what is to be summed for the gradients of q_norm_weight and k_norm_weight. A
// head of many steps adds to its row: zeros then.
cudaError_t norm_backward(const NormBackwardArgs& n, const BackwardPlan& plan, double* sums, cudaStream_t stream);

cudaError_t table_backward(const TableBackwardArgs& b, const TablePlan& plan, cudaStream_t stream);

// positions are contiguous.
cudaError_t cos_sin(const CosSinArgs& c, cudaStream_t stream);

}  // namespace rope::cuda
