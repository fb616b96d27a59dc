// The operators: their schemas, and how a call of one is read from the dispatcher's stack. Each argument is said once,
// in operators.cpp. A kernel of any layer (a back end, autograd, the in-place guards) is a function of a boxed call.
#pragma once

#include <ATen/core/stack.h>
#include <torch/library.h>

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "call.h"
#include "namespace.h"

namespace rope {

using torch::jit::Stack;
struct Field;

struct Operator {
  c10::FunctionSchema schema;
  std::string name;  // for messages, such as rope.rotate_
  bool in_place;     // it writes tensors and returns nothing

  explicit Operator(const std::string& schema);

  // Returns the arguments on the top of the stack. The call holds pointers to the tensors there. From Python, None
  // passes for an argument that the schema declares as Tensor: read() raises a ValueError, read_flags() does not.
  Call read(const Stack& stack) const;
  Call read_flags(const Stack& stack) const;
  // Returns whether a call of an in-place operator writes the argument with this number. With q_out, q, which is
  // argument 0, is only read.
  bool writes(const Stack& stack, size_t number) const;
  // Returns the arguments of a call as the dispatcher takes them.
  Stack arguments(const Call& call) const;
  // Replaces the arguments on the top of the stack by results, which it moves.
  void finish(Stack& stack, std::span<Tensor> results) const;
  // Calls the operator from the top of the dispatcher, and returns its results.
  std::vector<Tensor> operator()(const Call& call) const;

 private:
  std::vector<const Field*> fields_;  // of the arguments, in the order of the schema
  std::vector<bool> written_;         // whether the schema says that they are written
  std::optional<size_t> q_out_;       // the number of this argument
  size_t needed_ = 0;                 // the first arguments are tensors that a call must have
};

const std::vector<Operator>& operators();
// Returns the operator with this name, such as rotate_.
const Operator& find(std::string_view name);

// Registers f for an operator in a library. f replaces the arguments on the stack by the results.
template <void (*f)(const Operator&, const c10::OperatorHandle&, c10::DispatchKeySet, Stack&)>
void implement(torch::Library& library, const Operator& op) {
  struct Kernel : c10::OperatorKernel {
    const Operator& op;
    explicit Kernel(const Operator& op) : op(op) {}
    void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, Stack* stack) {
      f(op, handle, keys, *stack);
    }
  };
  library.impl(op.schema.name().c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(op)));
}

}  // namespace rope
