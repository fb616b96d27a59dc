#include "overlap.h"

#include <ATen/functorch/BatchedTensorImpl.h>

#include <algorithm>

namespace rope {
namespace {

// The set of all sums over some terms of step * t, with 0 <= t <= count in each term. These are the byte offsets of the
// elements of a strided tensor.
class Sums {
 public:
  void add(int64_t step, int64_t count) {
    if (step == 0 || count == 0) return;
    for (Term& term : terms_) {
      if (term.step == step) {
        term.count += count;  // equal strides of two tensors act as one longer dimension
        return;
      }
    }
    terms_.push_back({step, count, 0});
  }

  // Returns whether a sum lies in [low, high].
  bool reach(int64_t low, int64_t high) {
    std::sort(terms_.begin(), terms_.end(), [](const Term& a, const Term& b) { return a.step > b.step; });
    int64_t rest = 0;
    for (size_t i = terms_.size(); i-- > 0;) terms_[i].rest = rest += terms_[i].step * terms_[i].count;
    budget_ = 100000;
    return reach_from(0, low, high);
  }

 private:
  struct Term {
    int64_t step, count, rest;  // rest: the largest sum of this term and all smaller ones
  };

  // Returns whether a sum of the terms from i on lies in [low, high]. The terms are sorted, largest step first. Only
  // those t are tried that leave a remainder which the smaller steps can reach, so nested dimensions leave one or two
  // t.
  bool reach_from(size_t i, int64_t low, int64_t high) {
    if (high < 0) return false;
    if (low <= 0) return true;
    if (i == terms_.size() || low > terms_[i].rest) return false;
    if (--budget_ < 0)
      return true;  // no known layout has such strides: reject it, because a missed overlap would be worse
    const auto [step, count, total] = terms_[i];
    const int64_t below = total - step * count;
    const int64_t first = low <= below ? 0 : (low - below + step - 1) / step;
    const int64_t last = std::min(count, high / step);
    for (int64_t t = first; t <= last; t++) {
      if (reach_from(i + 1, low - t * step, high - t * step)) return true;
    }
    return false;
  }

  c10::SmallVector<Term, 8> terms_;
  int64_t budget_ = 0;
};

// Returns the tensor that holds all samples, if vmap maps t.
const at::Tensor& with_samples(const at::Tensor& t) {
  const auto* const mapped = at::functorch::maybeGetBatchedImpl(t);
  return mapped ? with_samples(mapped->value()) : t;
}

constexpr int64_t kMost = int64_t(1) << 56;

}  // namespace

Memory::Memory(const at::Tensor& given)
    : tensor_(with_samples(given)), dims_(tensor_.dim()), itemsize_(int64_t(tensor_.element_size())) {
  const at::Tensor& t = tensor_;
  const c10::TensorImpl& impl = *t.unsafeGetTensorImpl();
  if (impl.has_symbolic_sizes_strides()) return;
  sizes_ = t.sizes().data();
  strides_ = t.strides().data();
  int64_t last = 0;  // element offset of the last element
  for (int64_t d = 0; d < dims_; d++) {
    if (sizes_[d] == 0) return;
    int64_t span = 0;
    const bool overflow = __builtin_mul_overflow(sizes_[d] - 1, strides_[d], &span);
    // Only a fake tensor is so large. Sums of offsets in smaller ones do not overflow.
    if (overflow || span >= kMost || (last += span) >= kMost) return;
  }
  const c10::StorageImpl* const storage = impl.unsafe_storage().unsafeGetStorageImpl();
  if (!storage) return;  // a tensor that wraps others
  // Two storages may hold the same memory (call torch.from_numpy twice on one array), which only their addresses show.
  // On other devices, data() is a handle and not an address.
  const bool has_address = (t.is_cpu() || t.is_cuda()) && !impl.key_set().has(c10::DispatchKey::Meta) &&
                           !impl.key_set().has(c10::DispatchKey::Python);
  const void* const address = has_address ? storage->data() : nullptr;
  storage_ = address ? nullptr : storage;
  begin_ = reinterpret_cast<intptr_t>(address) + t.storage_offset() * itemsize_;
  length_ = (last + 1) * itemsize_;
}

bool Memory::is(const Memory& other) const {
  if (tensor_.scalar_type() != other.tensor_.scalar_type() || dims_ != other.dims_) return false;
  if (!range_overlaps(other) || begin_ != other.begin_) return false;
  for (int64_t d = 0; d < dims_; d++) {
    if (sizes_[d] != other.sizes_[d] || (sizes_[d] > 1 && strides_[d] != other.strides_[d])) return false;
  }
  return true;
}

bool Memory::overlaps_itself() const {
  if (length_ == 0 || tensor_.unsafeGetTensorImpl()->is_non_overlapping_and_dense_or_false()) return false;
  bool nested = true;
  for (int64_t d = 0; d < dims_; d++) {
    if (sizes_[d] < 2) continue;
    if (step(d) == 0) return true;
    int64_t within = itemsize_;  // bytes that the smaller dimensions span
    for (int64_t e = 0; e < dims_; e++) {
      if (sizes_[e] > 1 && (step(e) < step(d) || (step(e) == step(d) && e > d))) within += (sizes_[e] - 1) * step(e);
    }
    nested = nested && within <= step(d);
  }
  if (nested) return false;
  // Two elements share a byte if their distance is smaller than an element. Let d be the dimension with the largest
  // step among those in which their indices differ. The distance is step(d) * (1 + t), with 0 <= t <= n - 2, plus
  // step(e) * u for each dimension e with a smaller step, with -(n - 1) <= u <= n - 1, where n is the size of the
  // dimension. Sums counts from 0, so n - 1 is added to each u, and to the target.
  for (int64_t d = 0; d < dims_; d++) {
    if (sizes_[d] < 2) continue;
    Sums sums;
    sums.add(step(d), sizes_[d] - 2);
    int64_t target = -step(d);
    for (int64_t e = 0; e < dims_; e++) {
      if (step(e) < step(d) || (step(e) == step(d) && e > d)) {
        sums.add(step(e), 2 * (sizes_[e] - 1));
        target += step(e) * (sizes_[e] - 1);
      }
    }
    if (sums.reach(target - (itemsize_ - 1), target + (itemsize_ - 1))) return true;
  }
  return false;
}

bool Memory::shares_byte(const Memory& other) const {
  // An element at byte offset a of this tensor and an element at byte offset b of the other share a byte if a - b is
  // close enough to other.begin_ - begin_. b is counted from the last element backwards, so that every term of the
  // sum is positive; the target moves by the byte offset of the last element.
  Sums sums;
  int64_t target = other.begin_ - begin_;
  for (int64_t d = 0; d < dims_; d++) sums.add(step(d), sizes_[d] - 1);
  for (int64_t d = 0; d < other.dims_; d++) {
    sums.add(other.step(d), other.sizes_[d] - 1);
    target += other.step(d) * (other.sizes_[d] - 1);
  }
  return sums.reach(target - (itemsize_ - 1), target + (other.itemsize_ - 1));
}

}  // namespace rope
