// Whether strided tensors share memory, exactly: slices of one packed tensor interleave and are still apart.
#pragma once

#include <ATen/core/Tensor.h>

namespace rope {

// The bytes of a tensor. None where it is empty, and none that we know of where a size or stride is symbolic: there the
// real kernel looks again.
class Memory {
 public:
  explicit Memory(const at::Tensor& t);

  // The same element at two different indices.
  bool overlaps_itself() const;

  // A byte in common.
  bool overlaps(const Memory& other) const { return range_overlaps(other) && shares_byte(other); }

  // A byte in common between the first and the last of each.
  bool range_overlaps(const Memory& other) const {
    if (!known_ || !other.known_) return false;
    if (storage_ != other.storage_ && !(address_ && other.address_)) return false;
    const intptr_t apart = begin() - other.begin();
    return apart < other.length_ && -apart < length_;
  }

 private:
  bool shares_byte(const Memory& other) const;
  intptr_t begin() const { return address_ + first_; }
  int64_t step(int64_t d) const { return strides_[d] * itemsize_; }

  const at::Tensor& tensor_;
  bool known_ = false;
  int64_t dims_, itemsize_;
  const int64_t *sizes_, *strides_;  // the tensor's own
  int64_t first_ = 0;                // byte offset in the storage
  int64_t length_;                   // bytes from the first to the last
  const c10::StorageImpl* storage_ = nullptr;
  intptr_t address_ = 0;  // of the storage, where it is one
};

}  // namespace rope
