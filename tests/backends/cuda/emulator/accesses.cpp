// Checks every load and store of a kernel, and what else the compiler's instrumentation finds.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "run.h"

namespace emulator {

namespace {

// ---- races ----

// Returns the smallest group that has the running thread and those of past accesses, if no barrier orders these before
// the running thread; else one thread.
Group racing(const Past& past, bool shared) {
  const uint32_t in_block = past.thread - run.first_of_block;  // its number there, if it is in the same block
  const bool same_block = in_block < run.threads.size();
  if (!past.thread || (shared && !same_block)) return kOneThread;  // each block has its own shared memory
  const Group with_it = !same_block                        ? kGrid
                        : in_block / 32 != run.thread / 32 ? kOneBlock
                        : in_block != run.thread           ? kOneWarp
                                                           : kOneThread;
  const Group all = std::max(with_it, Group(past.threads));
  const bool ordered = (all <= kOneBlock && past.time < run.block_time.of[shared]) ||
                       (all <= kOneWarp && past.time < run.warp_times[run.thread / 32].of[shared]);
  return ordered ? kOneThread : all;
}

// Makes the shadow finer, or begins one.
void make_shadow(Touched& m, size_t granule) {
  const size_t count = (m.bytes() + granule - 1) / granule;
  auto* const finer = static_cast<Access*>(calloc(count, sizeof(Access)));  // takes no memory where nothing is accessed
  if (!finer) abort();
  for (size_t i = 0; m.shadow && i < count; i++) finer[i] = m.shadow[i * granule / m.granule];
  m.shadow.reset(finer, free);
  m.granule = granule;
}

// Checks that no other thread may access the same bytes at the same time, and records the access.
void check_order(Touched& m, uintptr_t a, size_t n, bool write, const void* where) {
  const bool shared = m.kind == kShared;
  const size_t at = a - m.begin, bits = at | n | 16, granule = bits & -bits;
  if (!m.shadow || m.granule > granule) make_shadow(m, granule);
  const auto race = [&](const char* kind, uint32_t thread) {
    const Size3& size = run.launch->block;
    const Size3 block = index_of((thread - 1) / size.count(), grid_size);
    stop(where, "race, ", kind, shared ? " of shared memory" : " of memory", " at byte ", at, " of ", m.bytes(),
         ", with block ", block, ", thread ", index_of((thread - 1) % size.count(), size_of(block)));
  };
  for (size_t i = at / m.granule; i <= (at + n - 1) / m.granule; i++) {
    Access& x = m.shadow[i];
    const Group readers = racing(x.reads, shared);
    if (racing(x.write, shared)) race(write ? "two writes" : "read after write", x.write.thread);
    if (write && readers) race("write after read", x.reads.thread);
    const Past now{run.first_of_block + run.thread, run.time, write ? kOneThread : readers};
    x = write ? Access{now, {}} : Access{x.write, now};
  }
}

// ---- memory that a kernel may touch ----

// Ends the launch because of an access to memory that the kernel may not touch.
[[noreturn, gnu::noinline]] void outside(uintptr_t a, size_t n, bool write, const void* where) {
  run.stack = 0;
  const std::string what = join(write ? "write of " : "read of ", n, " bytes");
  if (a < 4096) stop(where, what, " through a null pointer");
  const Memory nearest = nearest_allocation(a);
  const Memory& near = nearest.distance(a) < run.shared.distance(a) ? nearest : run.shared;
  if (near.distance(a) < 4096) stop(where, what, ", ", near.place(a));
  stop(where, what, " of memory that is not a tensor's");
}

// Returns the memory that an access is in. Returns null if it is foreign memory that kernels may touch, and ends the
// launch if they may not.
Touched* find(uintptr_t a, size_t n, bool write, const void* where) {
  if (run.shared.holds(a, n)) return &run.shared;
  for (Touched& m : run.others) {
    if (m.holds(a, n)) return &m;
  }
  const Memory m = nearest_allocation(a);
  if (options.foreign && a >= 4096 && m.distance(a) > kGuard) return nullptr;
  bool touchable = !run.launch->bound, writable = touchable;
  for (const Bound& b : run.launch->bound ? *run.launch->bound : std::vector<Bound>()) {
    if (uintptr_t(b.data) == m.begin) touchable = true, writable |= b.writable;
  }
  if (!m.holds(a, n) || m.kind == kFreed || !touchable) outside(a, n, write, where);
  run.others.push_back({m, writable});
  return &run.others.back();
}

// Counts the lines that an access touches, unless another thread of the warp has touched them in this instruction.
[[gnu::noinline]] void count_lines(Accesses& counted, size_t at, size_t n, const void* where) {
  const uint32_t before = run.executed[{run.thread, where}]++;
  for (uint64_t line = at / 128; line <= (at + n - 1) / 128; line++)
    counted.lines += run.lines.insert({run.thread / 32, where, before, &counted, line}).second;
}

// Accesses of another size, and those of types that are not aligned, have this number in Accesses::count.
constexpr int kOther = 5;
// clang takes a type of 16 bytes for aligned if it is aligned to 8 bytes.
#ifdef __clang__
constexpr size_t kAligned = 8;
#else
constexpr size_t kAligned = 16;
#endif

inline void access(const void* pointer, size_t n, bool write, int width, const void* where) {
  const auto a = uintptr_t(pointer);
  if (!n || !in_kernel() || a - run.stack < kStack) return;  // the thread's stack has its local variables
  if (width < kOther && a % std::min(n, kAligned)) stop(where, "misaligned pointer");
  if (!run.last->holds(a, n)) {
    if (run.image.holds(a, n)) {  // a constant, thread_index or similar
      if (write) stop(where, "write of a constant or of a variable of the host");
      return;
    }
    Touched* const found = find(a, n, write, where);
    if (!found) return;
    run.last = found;
  }
  Touched& m = *run.last;
  if (m.kind == kShared) {
    run.dirty = {std::min(run.dirty.begin, a), std::max(run.dirty.end, a + n)};
  } else {
    const char* const kind = write ? "write" : "read";
    if (run.launch->dependent && !run.threads[run.thread].waited)
      stop(where, kind, " of memory before the thread waits for the previous launch");
    if (write && !m.writable) stop(where, "write of memory that is bound to be read");
    Accesses& counted = write ? m.stores : m.loads;
    counted.bytes += n;
    counted.count[width]++;
    if (options.lines) count_lines(counted, a - m.begin, n, where);
  }
  check_order(m, a, n, write, where);
}

void undefined(const char* what, const void* where) {
  if (in_kernel()) stop(where, what);
  fprintf(stderr, "emulator: %s, in a function of the host\n", what);
  abort();
}

}  // namespace

}  // namespace emulator

// ---- the functions that instrumented code calls ----
// They are defined here because the sanitizers' own libraries are not linked.
extern "C" {
#define WHERE __builtin_return_address(0)
#define ACCESS(n, width)                                                                             \
  void __tsan_read##n(void* p) { emulator::access(p, n, false, width, WHERE); }                      \
  void __tsan_write##n(void* p) { emulator::access(p, n, true, width, WHERE); }                      \
  void __tsan_unaligned_read##n(void* p) { emulator::access(p, n, false, emulator::kOther, WHERE); } \
  void __tsan_unaligned_write##n(void* p) { emulator::access(p, n, true, emulator::kOther, WHERE); }
ACCESS(1, 0)
ACCESS(2, 1)
ACCESS(4, 2)
ACCESS(8, 3)
ACCESS(16, 4)
void __tsan_read_range(void* p, size_t n) { emulator::access(p, n, false, emulator::kOther, WHERE); }
void __tsan_write_range(void* p, size_t n) { emulator::access(p, n, true, emulator::kOther, WHERE); }
void __tsan_init() {}
// clang calls these.
#define COPY(name)                                             \
  void* __tsan_##name(void* to, const void* from, size_t n) {  \
    emulator::access(from, n, false, emulator::kOther, WHERE); \
    emulator::access(to, n, true, emulator::kOther, WHERE);    \
    return name(to, from, n);                                  \
  }
COPY(memcpy)
COPY(memmove)
void* __tsan_memset(void* to, int value, size_t n) {
  emulator::access(to, n, true, emulator::kOther, WHERE);
  return memset(to, value, n);
}

#define UNDEFINED(name, what)                                             \
  void __ubsan_handle_##name(void*) { emulator::undefined(what, WHERE); } \
  void __ubsan_handle_##name##_abort(void*) { emulator::undefined(what, WHERE); }
UNDEFINED(type_mismatch_v1, "misaligned pointer")
UNDEFINED(negate_overflow, "integer overflow in -")
UNDEFINED(divrem_overflow, "division by zero or integer overflow in /")
UNDEFINED(shift_out_of_bounds, "shift out of range")
UNDEFINED(out_of_bounds, "array index out of range")
UNDEFINED(float_cast_overflow, "a float that the integer type does not hold")

// clang can check unsigned integers too. Only overflows of 32 bits are mistakes: those may be element offsets that do
// not fit.
struct Overflow {
  const char* file;
  unsigned line, column;
  struct {
    uint16_t is_float, is_signed : 1, log_of_bits : 15;
  }* type;
  bool is_meant() const { return !type->is_signed && type->log_of_bits != 5; }
};
#define OVERFLOW(name, what)                                 \
  void __ubsan_handle_##name##_overflow(const Overflow* o) { \
    if (!o->is_meant()) emulator::undefined(what, WHERE);    \
  }                                                          \
  void __ubsan_handle_##name##_overflow_abort(const Overflow* o) { emulator::undefined(what, WHERE); }
OVERFLOW(add, "integer overflow in +")
OVERFLOW(sub, "integer overflow in -")
OVERFLOW(mul, "integer overflow in *")
}
