#if defined(__x86_64__)
#define ROPE_AVX512
#define ROPE_VARIANT avx512
#include "kernels.inc"
#endif
