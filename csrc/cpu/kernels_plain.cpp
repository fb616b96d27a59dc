#define ROPE_VARIANT plain
#include "kernels.inc"
