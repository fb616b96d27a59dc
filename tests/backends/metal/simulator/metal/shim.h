// Stands in for metal_stdlib in shaders that metal.py has translated to C++14. Address spaces vanish, and
// -fsanitize=thread shows the emulator every load and store. With SIMULATOR_ADDRESS_SPACES they are clang's address
// spaces instead, which serves to check the source, and to look at what a compiler makes of it; that build never runs.
#pragma once
#pragma clang system_header

// <cmath> is not included, because its functions of doubles would compete with those of the namespace metal.
#include <initializer_list>
#include <type_traits>
#include <utility>

#include "../library.h"

typedef _Float16 half;
#include "common.h"

#ifdef SIMULATOR_ADDRESS_SPACES
#define device __attribute__((address_space(1)))
#define constant const __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#else
#define device
#define constant const
#define threadgroup
#endif
#define thread
#define NAN __builtin_nanf("")
#define UNWATCHED __attribute__((no_sanitize("thread")))  // for functions that read variables of the host

namespace metal {

#ifdef SIMULATOR_ADDRESS_SPACES
void threadgroup_barrier(mem_flags) __attribute__((convergent));
template <typename T>
T simd_shuffle_xor(T, ushort) __attribute__((const, convergent));
}  // namespace metal
#else
// The default arguments are the file and line of the caller.
#define WHERE const char *file = __builtin_FILE(), int line = __builtin_LINE()
inline void threadgroup_barrier(mem_flags flags, WHERE) {
  emulator::block_barrier({"threadgroup_barrier", file, line}, emulator::Memories(flags));
}
// If the other lane does not exist, the result is undefined in Metal and all ones here, which is a NaN in the floating
// types.
template <typename T>
T simd_shuffle_xor(T x, ushort mask, WHERE) {
  const uint me = emulator::lane_index(), lane = me ^ mask;
  const bool there = lane < 32 && emulator::lanes() >> lane & 1;
  emulator::warp_exchange(emulator::lanes(), there ? lane : me, &x, sizeof x, {"simd_shuffle_xor", file, line});
  if (!there) __builtin_memset(&x, 0xff, sizeof x);
  return x;
}
#undef WHERE
}  // namespace metal
#endif

// ---- what metal.py calls ----

namespace simulator {

// C++'s copy constructor takes an object in its own address space only. These functions copy from the others.
#ifdef SIMULATOR_ADDRESS_SPACES
#define COPY_OF(...) simulator::copy_of(__VA_ARGS__)
template <typename T>
T copy_of(const T& x) {
  return x;
}
template <typename T>
T copy_of(constant T&);
template <typename T>
T copy_of(const device T&);
template <typename T>
T copy_of(const threadgroup T&);
#else
#define COPY_OF(...) __VA_ARGS__
#endif

// The vector constructors: float4(a, b, c, d), float4(a) and float4(v).
template <typename V>
struct Elements;
template <typename T, int N>
struct Elements<vec<T, N>> {
  typedef T type;
};
template <typename V, typename S>
auto vector(S s) -> typename std::enable_if<std::is_arithmetic<S>::value || sizeof(S) == 2, V>::type {
  return V(static_cast<typename Elements<V>::type>(s));
}
template <typename V, typename S>
auto vector(S v) -> decltype(void(Elements<S>()), V()) {
  return __builtin_convertvector(v, V);
}
template <typename V, typename... S>
auto vector(S... s) -> typename std::enable_if<(sizeof...(S) > 1), V>::type {
  return V{static_cast<typename Elements<V>::type>(s)...};
}

template <typename T>
struct Pointee {
  static const unsigned size = sizeof(T), alignment = alignof(T);
};
template <>
struct Pointee<void> {
  static const unsigned size = 1, alignment = 1;
};
template <>
struct Pointee<const void> : Pointee<void> {};

// Gets the value of a kernel's parameter of type P.
template <typename P>
struct Passed {
  static constexpr Type type() { return {0, 0, false, false, false}; }
  UNWATCHED static P get(const Call& c, int i) {
    return get(c, c.kernel->parameters[i].attribute, static_cast<P*>(nullptr));
  }
  template <typename I>
  UNWATCHED static typename std::enable_if<std::is_integral<I>::value, I>::type get(const Call& c, Attribute a, I*) {
    return I(value(c, a, 0));
  }
  template <typename I>
  UNWATCHED static vec<I, 2> get(const Call& c, Attribute a, vec<I, 2>*) {
    return {I(value(c, a, 0)), I(value(c, a, 1))};
  }
  template <typename I>
  UNWATCHED static vec<I, 3> get(const Call& c, Attribute a, vec<I, 3>*) {
    return {I(value(c, a, 0)), I(value(c, a, 1)), I(value(c, a, 2))};
  }
};
template <typename T>
struct Passed<T*> {
  static constexpr Type type() {
    return {Pointee<T>::size, Pointee<T>::alignment, true, false, !std::is_const<T>::value};
  }
  UNWATCHED static T* get(const Call& c, int i) { return static_cast<T*>(c.data[i]); }
};
template <typename T>
struct Passed<T&> {
  static constexpr Type type() { return {sizeof(T), alignof(T), false, true, !std::is_const<T>::value}; }
  UNWATCHED static T& get(const Call& c, int i) { return *static_cast<T*>(c.data[i]); }
};

template <typename... P>
struct Signature {
  template <size_t... I>
  UNWATCHED static void call(const Call& c, std::index_sequence<I...>) {
    reinterpret_cast<void (*)(P...)>(c.kernel->function)(Passed<P>::get(c, I)...);
  }
  UNWATCHED static void call(const Call& c) { call(c, std::index_sequence_for<P...>()); }
};
}  // namespace simulator

#ifdef SIMULATOR_ADDRESS_SPACES
// The function constants have the values SIMULATOR_VALUES, in the order of their indices, and then 0.
namespace simulator {
constexpr int values[100] = {SIMULATOR_VALUES};
}
#define VARIABLE(type, name)
#define CONSTANT(name, index) static const int name = simulator::values[index]
#define DERIVED(name, ...) static const bool name = __VA_ARGS__
#define KERNEL(...)
#define INSTANCE(number, host_name, limit, attributes, ...) template decltype(__VA_ARGS__) __VA_ARGS__
#define inline inline __attribute__((always_inline))  // Metal's compiler inlines every function
#else
// The list ends before the first element without a name.
extern "C" simulator::Constant simulator_constants[100] = {};
extern "C" simulator::Derived simulator_derived[100] = {};  // in the order of the source
extern "C" simulator::Kernel simulator_kernels[1000] = {};

namespace simulator {

struct Registered {
  UNWATCHED Registered(const char* name, int index, int* data) {
    *first_free(simulator_constants) = {name, index, data};
  }
  UNWATCHED Registered(const char* name, void (*compute)()) { *first_free(simulator_derived) = {name, compute}; }
  template <typename... P>
  UNWATCHED Registered(const char* name, void (*function)(P...), unsigned max_threads,
                       std::initializer_list<Parameter> parameters) {
    static_assert(sizeof...(P) <= Kernel::kMost, "the simulator does not support this many parameters");
    Kernel* const k = first_free(simulator_kernels);
    *k = {name, max_threads,           reinterpret_cast<void (*)()>(function), Signature<P...>::call, sizeof...(P),
          {},   {Passed<P>::type()...}};
    for (const Parameter& p : parameters) k->parameters[&p - parameters.begin()] = p;
  }
  template <typename T>
  UNWATCHED static T* first_free(T* all) {
    while (all->name) all++;
    return all;
  }
};

}  // namespace simulator

#define LIST(...) {__VA_ARGS__}
#define VARIABLE(type, name) static type name
#define CONSTANT(name, index) static const simulator::Registered registered_##name(#name, index, &name)
#define DERIVED(name, ...) static const simulator::Registered registered_##name(#name, [] { name = __VA_ARGS__; })
#define KERNEL(number, host_name, limit, attributes, ...) \
  static const simulator::Registered registered_##number(host_name, &__VA_ARGS__, limit, attributes)
#define INSTANCE KERNEL
#endif
