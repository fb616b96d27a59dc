#pragma once

#include <c10/util/Exception.h>

#include "cuda_runtime.h"

#define C10_CUDA_CHECK(call)                                                      \
  do {                                                                            \
    const cudaError_t error = call;                                               \
    TORCH_CHECK(error == cudaSuccess, "CUDA error: ", cudaGetErrorString(error)); \
  } while (0)
