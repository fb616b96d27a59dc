// The operators as torch's dispatcher sees them: their schemas, and kernels that take each argument by itself.
#pragma once

#include <torch/library.h>

#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "call.h"

namespace rope {

std::vector<std::string> schemas();

template <typename... T>
struct Types {};

// Of what Angles or NormAngles pass.
template <typename A>
auto types_of(const A& angles) {
  return angles.pass([](const auto&... each) { return Types<std::decay_t<decltype(each)>...>(); });
}
template <typename A>
using TypesOf = decltype(types_of(std::declval<A>()));

// As a kernel takes it.
template <typename T>
using Argument = std::conditional_t<std::is_same_v<T, OptTensor>, const OptTensor&, T>;

template <typename A, typename R, typename Own, typename Each>
struct UnpackedAs;
template <typename A, typename R, typename... Own, typename... Each>
struct UnpackedAs<A, R, Types<Own...>, Types<Each...>> {
  using Type = R(Own..., Argument<Each>...);
  template <auto f>
  static R kernel(Own... own, Argument<Each>... each) {
    return f(A{each...}, std::forward<Own>(own)...);
  }
};

// R f(angles, own...) is, for the dispatcher, R(own..., each of the angles).
template <typename F>
struct Unpacked;
template <typename A, typename R, typename... Own>
struct Unpacked<R(const A&, Own...)> : UnpackedAs<A, R, Types<Own...>, TypesOf<A>> {};

template <auto f>
constexpr auto* kernel = &Unpacked<std::remove_pointer_t<decltype(f)>>::template kernel<f>;

}  // namespace rope
