#include "overlap.h"

#include <algorithm>

namespace rope {
namespace {

// All sums of step * t with 0 <= t <= count, over at most 8 terms: the byte offsets that a strided tensor can reach.
class Sums {
 public:
  void add(int64_t step, int64_t count) {
    if (step == 0 || count == 0) return;
    for (int i = 0; i < size_; i++) {
      if (terms_[i].step == step) {
        terms_[i].count += count;  // equal strides of two tensors act as one longer dimension
        return;
      }
    }
    terms_[size_++] = {step, count, 0};
  }

  // Whether a sum lies in [low, high].
  bool reach(int64_t low, int64_t high) {
    std::sort(terms_, terms_ + size_, [](const Term& a, const Term& b) { return a.step > b.step; });
    int64_t rest = 0;
    for (int i = size_ - 1; i >= 0; i--) terms_[i].rest = rest += terms_[i].step * terms_[i].count;
    budget_ = 100000;
    return reach_from(0, low, high);
  }

 private:
  struct Term {
    int64_t step, count, rest;  // rest: the largest sum of this term and all smaller ones
  };

  // Largest steps first. What is left must be within the reach of the smaller steps, so nested dimensions leave one or
  // two candidates.
  bool reach_from(int i, int64_t low, int64_t high) {
    if (high < 0) return false;
    if (low <= 0) return true;
    if (i == size_ || low > terms_[i].rest) return false;
    if (--budget_ < 0) return true;  // strides of no layout that we know: rather refused than wrong
    const auto [step, count, total] = terms_[i];
    const int64_t below = total - step * count;
    const int64_t first = low <= below ? 0 : (low - below + step - 1) / step;
    const int64_t last = std::min(count, high / step);
    for (int64_t t = first; t <= last; t++) {
      if (reach_from(i + 1, low - t * step, high - t * step)) return true;
    }
    return false;
  }

  Term terms_[8];
  int size_ = 0;
  int64_t budget_ = 0;
};

}  // namespace

Memory::Memory(const at::Tensor& t)
    : tensor_(t), dims_(t.dim()), itemsize_(int64_t(t.element_size())), length_(itemsize_) {
  // More dimensions are in no argument that passes the checks of shapes.
  if (t.unsafeGetTensorImpl()->has_symbolic_sizes_strides() || dims_ > 4) return;
  sizes_ = t.sizes().data();
  strides_ = t.strides().data();
  for (int64_t d = 0; d < dims_; d++) {
    if (sizes_[d] == 0) return;
    length_ += (sizes_[d] - 1) * step(d);
  }
  first_ = t.storage_offset() * itemsize_;
  known_ = true;
  storage_ = t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  // Two storages may still be one memory (torch.from_numpy twice), which only an address can tell; on other devices
  // data() is a handle and no address.
  if ((t.is_cpu() || t.is_cuda()) && !t.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Meta))
    address_ = reinterpret_cast<intptr_t>(storage_->data());
}

bool Memory::overlaps_itself() const {
  if (!known_ || tensor_.unsafeGetTensorImpl()->is_non_overlapping_and_dense_or_false()) return false;
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
  // Two indices whose largest differing step is that of dimension d: step * (1 + t) + the smaller dimensions, each from
  // -(n - 1) to n - 1.
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
  // apart + (an offset in this) - (an offset in the other), the latter counted from its end so that every term is
  // positive.
  Sums sums;
  int64_t target = other.begin() - begin();
  for (int64_t d = 0; d < dims_; d++) sums.add(step(d), sizes_[d] - 1);
  for (int64_t d = 0; d < other.dims_; d++) {
    sums.add(other.step(d), other.sizes_[d] - 1);
    target += other.step(d) * (other.sizes_[d] - 1);
  }
  return sums.reach(target - (itemsize_ - 1), target + (other.itemsize_ - 1));
}

}  // namespace rope
