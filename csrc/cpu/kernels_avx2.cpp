#if defined(__x86_64__)
#define ROPE_AVX2
#define ROPE_VARIANT avx2
#include "kernels.inc"
#endif
