// Declares what shim.h defines, for the check of a shader as OpenCL C++, whose address spaces are Metal's. This build
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

#include "types.h"
typedef __SIZE_TYPE__ size_t;

namespace metal {

float fma(float, float, float);
float rint(float);
float fabs(float);
namespace precise {
float sqrt(float);
float divide(float, float);
}  // namespace precise
bool isfinite(float);
template <typename T>
T min(T, T);
template <typename T>
T max(T, T);

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
mem_flags operator|(mem_flags, mem_flags);
void threadgroup_barrier(mem_flags);
template <typename T>
T simd_shuffle_xor(T, ushort);

}  // namespace metal

using namespace metal;
template <typename T, typename F>
T as_type(F);

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
