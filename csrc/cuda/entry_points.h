// The functions that cuda.cpp calls to launch the kernels. Each returns the error of its launches, if any.
#pragma once

#include <cuda_runtime.h>

#include "norm_plan.h"

namespace rope::cuda {

// Returns the architecture that the kernels are compiled for of which the current device runs the code, such as 90.
cudaError_t architecture(int& found);

cudaError_t rotate_usually(const Args& a, const Plan& plan, cudaStream_t stream);  // needs a plan that is not general
cudaError_t rotate_generally(const Args& a, const Plan& plan, cudaStream_t stream);

// sums: plan.sums numbers, for the sums of each part. The kernels write them before they read them.
// weight_grad: the gradients of the weights of q and k, contiguous, of the shapes and dtypes of the weights.
// dependent: the code is for sm_90 or later, so the last kernel may begin before the one before it has ended, and wait.
cudaError_t norm_backward(const Args& a, const Plan& plan, double* sums, void* const (&weight_grad)[2],
                          cudaStream_t stream, bool dependent);
cudaError_t cos_sin(const CosSinArgs& c, cudaStream_t stream);  // the positions must be contiguous

}  // namespace rope::cuda
