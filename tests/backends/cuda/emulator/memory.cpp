// Allocations with guards, which show whether code that is not instrumented writes past their ends.
#include <algorithm>
#include <cstring>
#include <mutex>
#include <new>
#include <stdexcept>

#include "run.h"

namespace emulator {

namespace {

constexpr size_t kKept = 8 << 20;  // bytes of freed memory that are kept, to notice accesses to them
constexpr unsigned char kPattern = 0xcb;

// The registry is never destroyed, because tensors are freed even after static objects are destroyed.
struct Registry {
  std::mutex mutex;
  std::map<uintptr_t, Memory> live;
  std::deque<Memory> freed;
  size_t freed_bytes = 0;
  std::string finding;  // a guard that was written before its memory was freed
};
Registry& registry = *new Registry;

// Returns how many bytes an allocation and its guards have.
size_t guarded(size_t bytes) { return (bytes + kGuard - 1) / kGuard * kGuard + 2 * kGuard; }

// Notes a finding if a guard of this memory was written, and repairs the guard, so that it is reported once.
void check_guard(const Memory& m) {
  const auto check = [&](uintptr_t begin, uintptr_t end) {
    auto* const p = reinterpret_cast<unsigned char*>(begin);
    const auto a = uintptr_t(std::find_if(p, p + (end - begin), [](unsigned char c) { return c != kPattern; }));
    if (a == end) return;
    if (registry.finding.empty()) registry.finding = "write " + m.place(a);
    memset(p, kPattern, end - begin);
  };
  check(m.begin - kGuard, m.begin);
  check(m.end, m.begin - kGuard + guarded(m.bytes()));
}

void give_back(const Memory& m) { free(reinterpret_cast<void*>(m.begin - kGuard)); }

}  // namespace

std::string Memory::place(uintptr_t a) const {
  const char* const names[] = {"an allocation", "a freed allocation", "the launch's shared memory"};
  const std::string where = a < begin ? join(begin - a, " bytes before the start of ")
                            : a < end ? join("at byte ", a - begin, " of ")
                                      : join(a - end, " bytes past the end of ");
  return join(where, names[kind], " of ", bytes(), " bytes");
}

void* allocate(size_t bytes) {
  auto* const memory = static_cast<unsigned char*>(aligned_alloc(kGuard, guarded(bytes)));
  if (!memory) throw std::bad_alloc();
  memset(memory, kPattern, guarded(bytes));
  memset(memory + kGuard, 0xff, bytes);
  const auto begin = uintptr_t(memory) + kGuard;
  const std::lock_guard<std::mutex> lock(registry.mutex);
  registry.live[begin] = {begin, begin + bytes};
  return memory + kGuard;
}

void release(void* data) {
  const std::lock_guard<std::mutex> lock(registry.mutex);
  const auto found = registry.live.find(uintptr_t(data));
  if (found == registry.live.end()) return;
  Memory m = found->second;
  registry.live.erase(found);
  check_guard(m);
  m.kind = kFreed;
  if (m.bytes() > kKept / 8) return give_back(m);
  memset(data, 0xff, m.bytes());
  registry.freed.push_back(m);
  registry.freed_bytes += guarded(m.bytes());
  while (registry.freed_bytes > kKept) {
    registry.freed_bytes -= guarded(registry.freed.front().bytes());
    give_back(registry.freed.front());
    registry.freed.pop_front();
  }
}

Memory nearest_allocation(uintptr_t a) {
  const std::lock_guard<std::mutex> lock(registry.mutex);
  Memory nearest;
  const auto look = [&](const Memory& m) {
    if (!nearest.end || m.distance(a) < nearest.distance(a)) nearest = m;
  };
  const auto after = registry.live.upper_bound(a);
  if (after != registry.live.begin()) look(std::prev(after)->second);
  if (after != registry.live.end()) look(after->second);
  if (nearest.distance(a)) std::for_each(registry.freed.begin(), registry.freed.end(), look);
  return nearest;
}

std::string written_guard() {
  const std::lock_guard<std::mutex> lock(registry.mutex);
  for (const auto& [_, m] : registry.live) check_guard(m);
  return std::exchange(registry.finding, "");
}

void check_guards() {
  if (const std::string finding = written_guard(); !finding.empty()) throw std::runtime_error(finding);
}

}  // namespace emulator
