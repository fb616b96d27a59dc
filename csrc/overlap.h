// Whether strided tensors share memory, exactly: slices of one packed tensor interleave and are still apart.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace rope {

// The bytes of a tensor. None where it is empty, and none that we know of where a size or stride is symbolic: there the
// real kernel looks again.
class Memory {
 public:
  explicit Memory(const at::Tensor& t);

  // The same element at two different indices.
  bool overlaps_itself() const;

  // A byte in common.
  bool overlaps(const Memory& other) const;

  // A byte in common between the first and the last of each.
  bool range_overlaps(const Memory& other) const;

 private:
  std::optional<int64_t> distance(const Memory& other) const;
  int64_t step(int64_t d) const { return strides_[d] * itemsize_; }

  const at::Tensor& tensor_;
  bool known_ = false;
  int64_t dims_, itemsize_;
  const int64_t *sizes_, *strides_;  // the tensor's own
  int64_t first_ = 0;                // byte offset in the storage
  int64_t length_;                   // bytes from the first to the last
  const c10::StorageImpl* storage_ = nullptr;
  const char* address_ = nullptr;  // of the storage, where it is one
};

}  // namespace rope
