// Stands in for shim.h in the check of a shader as OpenCL C++, whose address spaces are Metal's. This build
// never runs. It accepts pointers without an address space, and member functions of objects in any; metal.py refuses
// the former in the text, and clang's address spaces the latter. It refuses one thing that Metal allows: ?: between a
// variable and a temporary of a struct.
#pragma once

#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define device __global
#define constant __constant
#define threadgroup __local
#define thread __private
// Metal lacks these keywords of OpenCL.
#define global global_
#define local local_
#define generic generic_
#define NAN __builtin_nanf("")

namespace simulator {
float rint(float);
}
#include "common.h"
typedef __SIZE_TYPE__ size_t;

namespace metal {

void threadgroup_barrier(mem_flags);
template <typename T>
T simd_shuffle_xor(T, ushort);

}  // namespace metal

namespace simulator {

// The copy constructor takes an object in thread memory only. The second argument makes these overloads differ.
template <typename T>
T copy_of(T, long);
template <typename T>
T copy_of(constant T&, int);
template <typename T>
T copy_of(const device T&, int);
template <typename T>
T copy_of(const threadgroup T&, int);
template <typename V, typename... S>
V vector(S...);

}  // namespace simulator

#define COPY_OF(...) simulator::copy_of(__VA_ARGS__, 0)
#define VARIABLE(type, name) extern constant type name
#define CONSTANT(...)
#define DERIVED(...)
#define KERNEL(...)
#define INSTANCE(number, host_name, limit, attributes, ...) template decltype(__VA_ARGS__) __VA_ARGS__
