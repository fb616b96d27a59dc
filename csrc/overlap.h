// Finds out exactly whether strided tensors share memory. The address ranges of slices of one packed tensor interleave,
// although the slices share no element.
#pragma once

#include <ATen/core/Tensor.h>

namespace rope {

// The bytes that a tensor occupies, with all samples if vmap maps it. An empty tensor occupies none. If a size or
// stride is symbolic, the bytes are unknown and no overlap is reported; the kernel for real tensors checks again.
class Memory {
 public:
  explicit Memory(const at::Tensor& t);

  const at::Tensor& tensor() const { return tensor_; }

  // Returns whether elements at two different indices share a byte.
  bool overlaps_itself() const;

  // Returns whether an element of this tensor and an element of the other share a byte.
  bool overlaps(const Memory& other) const { return range_overlaps(other) && shares_byte(other); }

  // Returns whether both tensors are the same elements: of one dtype and shape, and each at one address.
  bool is(const Memory& other) const;

  // Returns whether the address ranges, each from the first to the last byte of a tensor, share a byte.
  bool range_overlaps(const Memory& other) const {
    const intptr_t apart = begin_ - other.begin_;
    return apart < other.length_ && -apart < length_ && storage_ == other.storage_;
  }

 private:
  bool shares_byte(const Memory& other) const;
  // A dimension of one element may have any stride.
  int64_t step(int64_t d) const { return sizes_[d] > 1 ? strides_[d] * itemsize_ : 0; }

  const at::Tensor& tensor_;
  int64_t dims_, itemsize_;
  const int64_t *sizes_, *strides_;  // the tensor's own
  // The address of the first element, and no storage; or its byte offset in a storage without an address to compare.
  intptr_t begin_ = 0;
  const c10::StorageImpl* storage_ = nullptr;
  int64_t length_ = 0;  // bytes from the start of the first element to the end of the last; 0 if empty or unknown
};

}  // namespace rope
