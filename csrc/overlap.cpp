#include "overlap.h"

#include <algorithm>
#include <optional>

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

struct Layout {
  int64_t dims;
  int64_t size[4], step[4];  // step in bytes
  int64_t itemsize, first;   // first: byte offset in the storage
  int64_t length() const {
    int64_t n = itemsize;
    for (int64_t d = 0; d < dims; d++) n += (size[d] - 1) * step[d];
    return n;
  }
};

// None for an empty tensor (it shares nothing) and a symbolic one.
std::optional<Layout> layout_of(const at::Tensor& t) {
  Layout l{t.dim(), {}, {}, int64_t(t.element_size()), 0};
  const auto sizes = t.sym_sizes(), strides = t.sym_strides();
  for (int64_t d = 0; d < l.dims; d++) {
    const auto size = sizes[d].maybe_as_int(), stride = strides[d].maybe_as_int();
    if (!size || !stride || *size == 0) return std::nullopt;
    l.size[d] = *size;
    l.step[d] = *stride * l.itemsize;
  }
  const auto offset = t.sym_storage_offset().maybe_as_int();
  if (!offset) return std::nullopt;
  l.first = *offset * l.itemsize;
  return l;
}

// Byte distance from the start of b to that of a, or none where they cannot share memory. Two storages may still be one
// memory (torch.from_numpy twice), which only an address can tell; on other devices data() is a handle and no address.
std::optional<int64_t> distance(const at::Tensor& a, const Layout& la, const at::Tensor& b, const Layout& lb) {
  if (a.is_alias_of(b)) return la.first - lb.first;
  if (!(a.is_cpu() || a.is_cuda()) || a.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Meta))
    return std::nullopt;
  const auto *pa = static_cast<const char*>(a.storage().data()), *pb = static_cast<const char*>(b.storage().data());
  if (!pa || !pb) return std::nullopt;
  return (reinterpret_cast<intptr_t>(pa) + la.first) - (reinterpret_cast<intptr_t>(pb) + lb.first);
}

}  // namespace

bool overlaps_itself(const at::Tensor& t) {
  const auto layout = layout_of(t);
  if (!layout) return false;
  const Layout& l = *layout;
  for (int64_t d = 0; d < l.dims; d++) {
    if (l.size[d] > 1 && l.step[d] == 0) return true;
  }
  // Two indices whose largest differing step is that of dimension d: step * (1 + t) + the smaller dimensions, each from
  // -(n - 1) to n - 1.
  for (int64_t d = 0; d < l.dims; d++) {
    if (l.size[d] < 2) continue;
    Sums sums;
    sums.add(l.step[d], l.size[d] - 2);
    int64_t target = -l.step[d];
    for (int64_t e = 0; e < l.dims; e++) {
      if (l.step[e] < l.step[d] || (l.step[e] == l.step[d] && e > d)) {
        sums.add(l.step[e], 2 * (l.size[e] - 1));
        target += l.step[e] * (l.size[e] - 1);
      }
    }
    if (sums.reach(target - (l.itemsize - 1), target + (l.itemsize - 1))) return true;
  }
  return false;
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  const auto la = layout_of(a), lb = layout_of(b);
  if (!la || !lb) return false;
  const auto apart = distance(a, *la, b, *lb);
  if (!apart || *apart >= lb->length() || -*apart >= la->length()) return false;
  // apart + (an offset in a) - (an offset in b), the latter counted from the end of b so that every term is positive.
  Sums sums;
  int64_t target = -*apart;
  for (int64_t d = 0; d < la->dims; d++) sums.add(la->step[d], la->size[d] - 1);
  for (int64_t d = 0; d < lb->dims; d++) {
    sums.add(lb->step[d], lb->size[d] - 1);
    target += lb->step[d] * (lb->size[d] - 1);
  }
  return sums.reach(target - (la->itemsize - 1), target + (lb->itemsize - 1));
}

}  // namespace rope
