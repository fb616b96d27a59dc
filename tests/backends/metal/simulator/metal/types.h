// The types of Metal that clang has under another name, or not at all. The type half must be known.
#pragma once

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef __bf16 bfloat;

namespace metal {

template <typename T, int N>
using vec = T __attribute__((ext_vector_type(N)));

#define VECTORS(T)        \
  typedef vec<T, 2> T##2; \
  typedef vec<T, 3> T##3; \
  typedef vec<T, 4> T##4;
VECTORS(float)
VECTORS(half)
VECTORS(char)
VECTORS(uchar)
VECTORS(short)
VECTORS(ushort)
VECTORS(int)
VECTORS(uint)
VECTORS(long)
VECTORS(ulong)
#undef VECTORS

}  // namespace metal
