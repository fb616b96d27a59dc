// The functions that cuda.cpp calls to launch the kernels. Each returns the error of its launches, if any.
#pragma once

#include <cuda_runtime.h>

#include "plan.h"

namespace rope::cuda {

// The stream that kernels are launched on.
struct Queue {
  cudaStream_t stream;
  // A kernel may begin before the previous kernel of the stream has ended (programmatic dependent launch). So its
  // thread blocks are ready when that one ends. Needs code for sm_90 or later.
  bool dependent;
};

// Returns the architecture that the kernels are compiled for of which the current device runs the code, such as 90.
cudaError_t architecture(int& found);

cudaError_t rotate(const RotateArgs& a, const Plan& plan, Queue queue);
cudaError_t norm_rotate(const RotateArgs& a, const Plan& plan, Queue queue);

// sums: [2, plan.sums, head_dim]; its sum over the second dimension is the gradients of q_norm_weight and
// k_norm_weight. If a head takes several steps (see in_one_step()), the kernel adds to the elements of sums, which must
// be zeros.
cudaError_t norm_backward(const NormBackwardArgs& n, const BackwardPlan& plan, double* sums, Queue queue);

cudaError_t table_backward(const TableBackwardArgs& b, const TablePlan& plan, Queue queue);

// The positions must be contiguous.
cudaError_t cos_sin(const CosSinArgs& c, Queue queue);

}  // namespace rope::cuda
