#include "emulator.h"

#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <stdexcept>
#include <tuple>
#include <utility>

#ifdef __SANITIZE_ADDRESS__  // AddressSanitizer then watches the loads and stores
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
constexpr size_t kStack = 256 * 1024;  // bytes of a fiber's stack; each switch takes long if there are more
#else
#define ASAN_POISON_MEMORY_REGION(...)
#define ASAN_UNPOISON_MEMORY_REGION(...)
constexpr size_t kStack = 64 * 1024;
#endif

namespace emulator {

Size3 thread_index, block_index, block_size, grid_size;
Options options;

namespace {

// The end of the shared variables. Every thread_local that is linked before this one is taken for a shared variable, so
// this must be the first thread_local of the file.
alignas(128) thread_local unsigned char end_of_variables;

// ---- fibers ----

extern "C" void emulator_switch(void** save, void* load);
asm(R"(
.text
.hidden emulator_switch
.type emulator_switch,@function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch,.-emulator_switch
)");
struct Context {
  void* top = nullptr;
  void start(char* stack, void (*f)()) {
    void** p = reinterpret_cast<void**>(stack + kStack);
    *--p = nullptr;  // the return address of f, which never returns; it also aligns the frame of f
    *--p = reinterpret_cast<void*>(f);
    top = p - 6;
  }
  void to(Context& other) { emulator_switch(&top, other.top); }
};

struct Fiber {
  Context context;
  const void* stack = nullptr;
  size_t stack_size = 0;
  int thread = -1;
};

// ---- memory ----

// The last accesses to some bytes. writer and reader are threads, by numbers that are unique among the threads of all
// launches. A time is the number of barriers that the thread's block and its warps have passed so far.
struct Access {
  uint32_t writer, reader, write_time, read_time : 29, readers : 3;
};
// The number of threads that have read since the last write. Readers before the last barrier of the last reader do not
// count.
enum Readers : uint32_t { kOneThread, kOneWarp, kOneBlock, kManyBlocks };

struct Memory {
  uintptr_t begin = 0, end = 0;
  bool shared = false;
  // One Access for every `granule` bytes: 16, or fewer as soon as there is a smaller access.
  Access* shadow = nullptr;
  size_t granule = 0;
  // The rest is of the current launch.
  bool writable = true;
  Accesses loads{}, stores{};

  size_t bytes() const { return end - begin; }
  bool holds(uintptr_t a, size_t n) const { return a >= begin && a + n <= end; }
};

constexpr size_t kGuard = 64;      // bytes of the guard on each side of an allocation
constexpr size_t kKept = 8 << 20;  // bytes of freed memory that are kept, to notice accesses to them
constexpr unsigned char kPattern = 0xcb;

size_t padded(size_t bytes) { return (bytes + kGuard - 1) / kGuard * kGuard; }

// The allocations. The registry is never destroyed, because tensors are freed even after static objects are destroyed.
struct Registry {
  std::mutex mutex;
  std::map<uintptr_t, Memory> live;
  std::deque<Memory> freed;
  size_t freed_bytes = 0;
  std::string finding;
};
Registry& registry = *new Registry;

// ---- one launch ----

enum Wait { kNowhere, kAtBlock, kAtWarp };
struct Thread {
  Fiber* fiber = nullptr;
  Wait wait = kNowhere;
  bool done = false;
  bool waited = false;  // for the previous launch
  // Set while the thread is at a barrier or exchange of its warp:
  bool barrier = false;
  Memories memories = kNoMemory;
  unsigned source = 0;
  Site site{};
  uint64_t value = 0, result = 0;
};

struct Run {
  std::mutex mutex;  // held during a launch: there is one at a time
  const Launch* launch = nullptr;
  Fiber host;                  // the code that called launch()
  std::vector<Fiber*> fibers;  // all fibers ever made
  std::vector<Fiber*> idle;
  std::deque<Fiber*> ready;
  Fiber* fiber = nullptr;  // the running fiber
  uintptr_t stack = 0;     // the stack of the running fiber; 0 while no kernel runs

  std::vector<Thread> threads;  // of the block
  uint32_t thread = 0;          // the running thread
  uint32_t begun = 0, done = 0, at_barrier = 0, at_warp = 0;
  Site barrier{};

  uint32_t numbers_used = 1, first_of_launch = 0, first_of_block = 0;  // unique numbers of threads
  uint32_t time = 0;  // barriers that the block and its warps have passed
  struct Times {
    uint32_t of[2] = {};  // of the last barrier that orders other memory, and of the last that orders shared memory
    void set(Memories m, uint32_t time) {
      for (int shared : {0, 1}) of[shared] = m >> shared & 1 ? time : of[shared];
    }
  } block_time;
  std::vector<Times> warp_time;

  // If options.lines is set: how often a thread of the block has executed an instruction, and the lines that were
  // counted, each with a warp, an instruction and how often that had been executed before.
  std::map<std::pair<uint32_t, const void*>, uint32_t> executed;
  std::set<std::tuple<uint32_t, const void*, uint32_t, Accesses*, uint64_t>> lines;

  Memory shared;
  uintptr_t variables = 0, end_of_variables = 0;  // the addresses of the shared variables
  uintptr_t dirty_begin = 0, dirty_end = 0;       // the bytes of `shared` that the last thread block has accessed
  uint32_t block_threads = 0;                     // threads of a full block
  std::vector<Memory*> touched;                   // memory from allocate() that the launch has accessed
  Memory* last = nullptr;                         // the memory of the last access, which is looked up first
  uintptr_t image_begin = 0, image_end = 0;       // the loaded library of the kernel, which has its constants

  std::string finding;
  const void* where = nullptr;  // the return address of the finding in the kernel
  std::deque<Record> records;
};
Run run;

std::string text(const std::string& s) { return s; }
std::string text(const char* s) { return s; }
std::string text(uint64_t n) { return std::to_string(n); }
std::string text(const Size3& s) { return "(" + text(s.x) + ", " + text(s.y) + ", " + text(s.z) + ")"; }
std::string text(const Site& s) { return text(s.what) + " in line " + text(s.line) + " of " + s.file; }

template <typename... T>
std::string join(const T&... parts) {
  return (std::string() + ... + text(parts));
}

// Ends the launch with a finding: control goes back to launch(), and no thread of the launch runs again.
template <typename... T>
[[noreturn, gnu::noinline]] void stop(const void* where, const T&... what) {
  run.stack = 0;  // ignore accesses: the linker may take the instrumented copy of join() from a kernel's object file
  run.finding = join(what...);
  run.where = where;
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(nullptr, run.host.stack, run.host.stack_size);
#endif
  run.fiber->context.to(run.host.context);
  abort();
}

// Returns the index on three axes of the i-th element of a grid of this size.
Size3 index_of(uint64_t i, const Size3& size) {
  return {unsigned(i % size.x), unsigned(i / size.x % size.y), unsigned(i / size.x / size.y)};
}

// Returns the size of the block with this index, which may be smaller at the edge of the grid.
Size3 size_of(const Size3& block) {
  const auto axis = [](unsigned at, unsigned full, unsigned threads) {
    return threads ? std::min(full, threads - at * full) : full;
  };
  const Size3 &full = run.launch->block, &threads = run.launch->threads;
  return {axis(block.x, full.x, threads.x), axis(block.y, full.y, threads.y), axis(block.z, full.z, threads.z)};
}

// ---- checks of every load and store ----

// Return whether `thread` is in the same block, or in the same warp, as the running thread.
bool in_block(uint32_t thread) { return thread - run.first_of_block < run.threads.size(); }
bool in_warp(uint32_t thread) { return in_block(thread) && (thread - run.first_of_block) / 32 == run.thread / 32; }
// Returns whether a barrier that orders this kind of memory lies between an access of `thread` at `time` and the
// running thread.
bool before_barrier(uint32_t thread, uint32_t time, bool shared) {
  return in_block(thread) &&
         (time < run.block_time.of[shared] || (in_warp(thread) && time < run.warp_time[run.thread / 32].of[shared]));
}

// Makes the shadow finer, or begins one.
void make_shadow(Memory& m, size_t granule) {
  const size_t count = (m.bytes() + granule - 1) / granule;
  auto* const shadow = static_cast<Access*>(calloc(count, sizeof(Access)));
  if (!shadow) abort();
  for (size_t i = 0; m.shadow && i < count; i++) shadow[i] = m.shadow[i * granule / m.granule];
  free(m.shadow);
  m.shadow = shadow;
  m.granule = granule;
}

// Checks that no other thread may access the same bytes at the same time, and records the access.
void check_order(Memory& m, uintptr_t a, size_t n, bool write, const void* where) {
  const size_t bits = (a - m.begin) | n | 16, granule = bits & -bits;
  if (!m.shadow || m.granule > granule) make_shadow(m, granule);
  const uint32_t me = run.first_of_block + run.thread;
  // Only accesses of the same block to shared memory count, and only those of the same launch to other memory.
  const auto known = [&](uint32_t thread) {
    return thread && (m.shared ? in_block(thread) : thread >= run.first_of_launch);
  };
  const auto race = [&](const char* kind, uint32_t thread) {
    const uint64_t other = thread - run.first_of_launch;
    const Size3 block = index_of(other / run.block_threads, grid_size);
    stop(where, "race, ", kind, m.shared ? " of shared memory" : " of memory", " at byte ", a - m.begin, " of ",
         m.bytes(), ", with block ", block, ", thread ", index_of(other % run.block_threads, size_of(block)));
  };
  const size_t end = (a + n - 1 - m.begin) / m.granule;
  for (size_t i = (a - m.begin) / m.granule; i <= end; i++) {
    Access& x = m.shadow[i];
    if (known(x.writer) && x.writer != me && !before_barrier(x.writer, x.write_time, m.shared))
      race(write ? "two writes" : "read after write", x.writer);
    const bool read = known(x.reader);
    if (write) {
      const bool ordered = x.readers == kOneThread  ? x.reader == me || before_barrier(x.reader, x.read_time, m.shared)
                           : x.readers == kOneWarp  ? before_barrier(x.reader, x.read_time, m.shared)
                           : x.readers == kOneBlock ? in_block(x.reader) && x.read_time < run.block_time.of[m.shared]
                                                    : false;
      if (read && !ordered) race("write after read", x.reader);
      x = {me, 0, run.time, 0, kOneThread};
    } else {
      Readers readers = kOneThread;
      if (read && (!in_block(x.reader) || x.readers == kManyBlocks)) {
        readers = kManyBlocks;
      } else if (read && x.read_time >= run.block_time.of[m.shared]) {
        if (!in_warp(x.reader) || x.readers == kOneBlock) {
          readers = kOneBlock;
        } else if (!before_barrier(x.reader, x.read_time, m.shared) && (x.reader != me || x.readers == kOneWarp)) {
          readers = kOneWarp;
        }
      }
      x = {x.writer, me, x.write_time, run.time, readers};
    }
  }
}

// Ends the launch because of an access to memory that the kernel may not touch. The message names the nearest memory.
[[noreturn, gnu::noinline]] void outside(uintptr_t a, size_t n, bool write, const void* where) {
  run.stack = 0;
  const std::string what = join(write ? "write of " : "read of ", n, " bytes");
  if (a < 4096) stop(where, what, " through a null pointer");
  uintptr_t least = 4096;
  std::string place = " of memory that is not a tensor's";
  const auto look = [&](const Memory& m, const char* name) {
    const uintptr_t distance = a < m.begin ? m.begin - a : a < m.end ? 0 : a - m.end;
    if (!m.end || distance >= least) return;
    least = distance;
    place = a < m.begin ? join(", ", distance, " bytes before the start of ")
            : a < m.end ? join(", at byte ", a - m.begin, " of ")
                        : join(", ", distance, " bytes past the end of ");
    place += join(name, " of ", m.bytes(), " bytes");
  };
  {
    const std::lock_guard<std::mutex> lock(registry.mutex);
    const auto after = registry.live.upper_bound(a);
    if (after != registry.live.end()) look(after->second, "an allocation");
    if (after != registry.live.begin()) look(std::prev(after)->second, "an allocation");
    for (const Memory& m : registry.freed) look(m, "a freed allocation");
    look(run.shared, "the launch's shared memory");
  }
  stop(where, what, place);
}

// Returns the memory that an access is in. Returns null if it is foreign memory that kernels may touch, and ends the
// launch if they may not.
Memory* find(uintptr_t a, size_t n, bool write, const void* where) {
  if (run.shared.holds(a, n)) return &run.shared;
  for (Memory* m : run.touched) {
    if (m->holds(a, n)) return m;
  }
  {
    const std::lock_guard<std::mutex> lock(registry.mutex);
    const auto after = registry.live.upper_bound(a);
    Memory* const before = after == registry.live.begin() ? nullptr : &std::prev(after)->second;
    if (before && before->holds(a, n)) {
      before->writable = true;
      if (const auto* const bound = run.launch->bound) {
        const auto is_it = [&](const Bound& b) { return uintptr_t(b.data) == before->begin; };
        if (std::none_of(bound->begin(), bound->end(), is_it)) outside(a, n, write, where);
        before->writable =
            std::any_of(bound->begin(), bound->end(), [&](const Bound& b) { return is_it(b) && b.writable; });
      }
      before->loads = before->stores = {};
      run.touched.push_back(before);
      return before;
    }
    const auto near = [&](const Memory& m) { return a + n > m.begin - kGuard && a < m.end + kGuard; };
    if (options.foreign && a >= 4096 && !(before && near(*before)) &&
        !(after != registry.live.end() && near(after->second)) &&
        std::none_of(registry.freed.begin(), registry.freed.end(), near))
      return nullptr;
  }
  outside(a, n, write, where);
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

[[maybe_unused]] inline void access(void* pointer, size_t n, bool write, int width, const void* where) {
  // The host runs instrumented code too, but not on the stack of a fiber.
  const uintptr_t a = uintptr_t(pointer), here = uintptr_t(__builtin_frame_address(0));
  if (here - run.stack >= kStack) return;
  if (a - run.stack < kStack) return;  // local variables of the thread
  if (width < kOther && a % std::min(n, kAligned)) stop(where, "misaligned pointer");
  Memory* m = run.last;
  if (!m->holds(a, n)) {
    if (a >= run.image_begin && a < run.image_end) {  // a constant, thread_index or similar
      if (write) stop(where, "write of a constant or of a variable of the host");
      return;
    }
    m = find(a, n, write, where);
    if (!m) return;
    run.last = m;
  }
  if (m == &run.shared) {
    run.dirty_begin = std::min(run.dirty_begin, a);
    run.dirty_end = std::max(run.dirty_end, a + n);
  }
  if (!m->shared) {
    if (run.launch->dependent && !run.threads[run.thread].waited) {
      stop(where, write ? "write" : "read", " of memory before the thread waits for the previous launch");
    }
    if (write && !m->writable) stop(where, "write of memory that is bound to be read");
    auto& counted = write ? m->stores : m->loads;
    counted.bytes += n;
    counted.count[width]++;
    if (options.lines) count_lines(counted, a - m->begin, n, where);
  }
  check_order(*m, a, n, write, where);
}

[[maybe_unused]] void undefined(const char* what, const void* where) {
  if (uintptr_t(__builtin_frame_address(0)) - run.stack < kStack) stop(where, what);
  fprintf(stderr, "emulator: %s, in a function of the host\n", what);
  abort();
}

// ---- fibers that run threads and wait ----

// The order in which n blocks or threads run, as options.order asks for: the i-th to run is operator()(i).
struct Permutation {
  uint64_t n, first = 0, step = 1;
  explicit Permutation(uint64_t n) : n(n) {
    if (options.order == Order::kBackward) first = step = n - 1;
    if (options.order == Order::kScrambled) {
      first = n / 3;
      step = n * 5 / 8 + 1;
      while (std::gcd(step, n) != 1) step++;
    }
  }
  uint64_t operator()(uint64_t i) const { return (first + i * step) % n; }
};

void run_threads();

Fiber* new_fiber() {
  if (run.idle.empty()) {
    auto* const memory = static_cast<char*>(
        mmap(nullptr, kStack + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (memory == MAP_FAILED) abort();
    mprotect(memory, 4096, PROT_NONE);
    run.fibers.push_back(new Fiber{{}, memory + 4096, kStack});
    run.idle.push_back(run.fibers.back());
  }
  Fiber* const fiber = run.idle.back();
  run.idle.pop_back();
  ASAN_UNPOISON_MEMORY_REGION(fiber->stack, kStack);  // an earlier launch may have abandoned frames there
  fiber->context.start(static_cast<char*>(const_cast<void*>(fiber->stack)), run_threads);
  fiber->thread = -1;
  return fiber;
}

// Makes `thread` the running thread.
void become(uint32_t thread) {
  run.thread = thread;
  thread_index = index_of(thread, block_size);
}

// Switches to a thread that no longer waits, else to one that has not begun, else to the host.
void switch_from(Fiber& from) {
  Fiber* to = &run.host;
  if (!run.ready.empty()) {
    to = run.ready.front();
    run.ready.pop_front();
  } else if (run.begun < run.threads.size()) {
    to = new_fiber();
  }
  if (to == &from) return;
  run.fiber = to;
  run.stack = to == &run.host ? 0 : uintptr_t(to->stack);
  if (to->thread >= 0) become(uint32_t(to->thread));
#ifdef __SANITIZE_ADDRESS__
  void* fake;
  __sanitizer_start_switch_fiber(&fake, to->stack, to->stack_size);
  from.context.to(to->context);
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#else
  from.context.to(to->context);
#endif
}

void wait(Wait where) {
  run.threads[run.thread].wait = where;
  switch_from(*run.fiber);
}
void end_wait(Thread& t) {
  t.wait = kNowhere;
  run.ready.push_back(t.fiber);
}

uint32_t warp_begin() { return run.thread / 32 * 32; }
uint32_t warp_end() { return std::min<uint32_t>(warp_begin() + 32, uint32_t(run.threads.size())); }

// Returns whether all lanes of the warp have come, but for those that have left the kernel. If so, exchanges their
// values and lets them continue.
bool finish_warp(bool barrier, Memories memories) {
  const uint32_t begin = warp_begin(), end = warp_end();
  for (uint32_t i = begin; i < end; i++) {
    const Thread& t = run.threads[i];
    if (!t.done && t.wait != kAtWarp && i != run.thread) return false;
  }
  if (barrier) run.warp_time[begin / 32].set(memories, ++run.time);
  for (uint32_t i = begin; i < end; i++) {
    Thread& t = run.threads[i];
    t.result = run.threads[begin + t.source].value;
    if (t.wait != kAtWarp) continue;
    end_wait(t);
    run.at_warp--;
  }
  return true;
}

// Checks that no lane of the warp waits for the running thread, which is at a barrier of its block, or leaves the
// kernel if barrier is null.
void check_not_awaited(const Site* barrier, const void* where) {
  if (!run.at_warp) return;
  for (uint32_t begin = warp_begin(), i = begin; i < warp_end(); i++) {
    const Thread& t = run.threads[i];
    if (t.wait != kAtWarp) continue;
    if (barrier) stop(where, "the thread comes to ", *barrier, " while lane ", i - begin, " waits for it at ", t.site);
    if (!t.barrier) stop(where, "the thread leaves the kernel while lane ", i - begin, " waits for it at ", t.site);
    finish_warp(true, t.memories);
  }
}

// The function that a fiber runs: it runs one thread after another. A thread that waits keeps its fiber, and a new
// fiber continues with the next thread.
void run_threads() {
#ifdef __SANITIZE_ADDRESS__
  const void* stack;
  size_t size;
  __sanitizer_finish_switch_fiber(nullptr, &stack, &size);
  if (!run.host.stack) run.host.stack = stack, run.host.stack_size = size;  // the first switch came from the host
#endif
  const Permutation order(run.threads.size());
  Fiber* const me = run.fiber;
  while (run.begun < run.threads.size()) {
    const auto i = uint32_t(order(run.begun++));
    me->thread = int(i);
    run.threads[i].fiber = me;
    become(i);
    run.launch->call(run.launch->arguments);
    run.threads[i].done = true;
    run.done++;
    check_not_awaited(nullptr, nullptr);
    if (run.at_barrier)
      stop(nullptr, "the thread leaves the kernel while ", run.at_barrier, " others wait at ", run.barrier);
  }
  me->thread = -1;
  run.idle.push_back(me);
  switch_from(*me);
  abort();  // not reached: new_fiber() starts the fiber from the beginning
}

bool same(const Site& a, const Site& b) { return a.line == b.line && !strcmp(a.file, b.file); }

// Waits for the other lanes of the warp at a barrier or an exchange. Returns the value of the source lane.
uint64_t meet(bool barrier, Memories memories, unsigned source, uint64_t value, const Site& site, const void* where) {
  for (uint32_t begin = warp_begin(), i = begin; i < warp_end(); i++) {
    const Thread& t = run.threads[i];
    if (t.done && !barrier) stop(where, site, " waits for lane ", i - begin, ", which has left the kernel");
    if (t.wait == kAtBlock) stop(where, site, " waits for lane ", i - begin, ", which waits at ", run.barrier);
    if (t.wait == kAtWarp && !same(t.site, site)) stop(where, site, ": lane ", i - begin, " waits at ", t.site);
  }
  Thread& me = run.threads[run.thread];
  me.barrier = barrier;
  me.memories = memories;
  me.source = source;
  me.site = site;
  me.value = value;
  if (!finish_warp(barrier, memories)) {
    run.at_warp++;
    wait(kAtWarp);
  }
  return me.result;
}

// Runs all threads of the block block_index.
void run_block() {
  block_size = size_of(block_index);
  run.threads.assign(block_size.count(), Thread{});
  run.warp_time.assign((run.threads.size() + 31) / 32, {});
  run.begun = run.done = run.at_barrier = run.at_warp = run.time = 0;
  run.block_time = {};
  run.ready.clear();
  run.idle = run.fibers;
  run.last = &run.shared;
  if (run.dirty_begin < run.dirty_end)
    memset(reinterpret_cast<void*>(run.dirty_begin), 0xff, run.dirty_end - run.dirty_begin);
  run.dirty_begin = UINTPTR_MAX;
  run.dirty_end = 0;
  run.executed.clear();
  run.lines.clear();
  switch_from(run.host);
  if (run.finding.empty() && run.done < run.threads.size()) run.finding = "the threads of a block wait for each other";
}

// ---- addresses of libraries and their source lines ----

// Finds the shared variables, which are thread_local and so different in each host thread, and the kernel's library.
void find_images() {
  run.end_of_variables = uintptr_t(&end_of_variables);  // this makes those of this host thread
  const auto look = [](dl_phdr_info* info, size_t, void*) {
    uintptr_t begin = UINTPTR_MAX, end = 0, variables = 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
      const auto& part = info->dlpi_phdr[i];
      const uintptr_t at = info->dlpi_addr + part.p_vaddr;
      if (part.p_type == PT_LOAD) begin = std::min(begin, at), end = std::max(end, at + uintptr_t(part.p_memsz));
      if (part.p_type == PT_TLS) variables = uintptr_t(info->dlpi_tls_data) + part.p_filesz;
    }
    if (uintptr_t(run.launch->kernel) - begin < end - begin) run.image_begin = begin, run.image_end = end;
    if (uintptr_t(&run) - begin < end - begin) run.variables = variables / 16 * 16;
    return 0;
  };
  dl_iterate_phdr(look, nullptr);
}

// Returns the lines that addr2line prints for an address of a loaded library.
std::vector<std::string> describe(const void* address, const char* option) {
  Dl_info info;
  if (!dladdr(address, &info)) return {};
  char command[4200];
  snprintf(command, sizeof command, "addr2line -Cs %s -e '%s' %#zx 2>/dev/null", option, info.dli_fname,
           size_t(address) - size_t(info.dli_fbase));
  std::vector<std::string> lines;
  FILE* const out = popen(command, "r");
  if (!out) return {};
  for (char line[2000]; fgets(line, sizeof line, out);) lines.emplace_back(line, strcspn(line, "\n"));
  pclose(out);
  return lines;
}

// Returns a finding if a guard of this memory was written, else an empty string. Repairs the guard, so that each
// finding is reported once.
std::string check_guard(const Memory& m) {
  std::string finding;
  const auto check = [&](uintptr_t begin, uintptr_t end) {
    auto* const p = reinterpret_cast<unsigned char*>(begin);
    ASAN_UNPOISON_MEMORY_REGION(p, end - begin);
    const uintptr_t a = uintptr_t(std::find_if(p, p + (end - begin), [](unsigned char c) { return c != kPattern; }));
    if (a < end)
      finding = join("write ", a < m.begin ? m.begin - a : a - m.end,
                     a < m.begin ? " bytes before the start" : " bytes past the end", " of an allocation of ",
                     m.bytes(), " bytes");
    memset(p, kPattern, end - begin);
    ASAN_POISON_MEMORY_REGION(p, end - begin);
  };
  check(m.begin - kGuard, m.begin);
  check(m.end, m.begin + padded(m.bytes()) + kGuard);
  return finding;
}

void give_back(const Memory& m) {
  void* const all = reinterpret_cast<void*>(m.begin - kGuard);
  ASAN_UNPOISON_MEMORY_REGION(all, padded(m.bytes()) + 2 * kGuard);
  free(all);
}

}  // namespace

unsigned lane_index() { return run.thread % 32; }
unsigned lanes() { return ~0u >> (32 - (warp_end() - warp_begin())); }

void wait_for_previous_launch() { run.threads[run.thread].waited = true; }

void fail(const char* what) {
  if (uintptr_t(__builtin_frame_address(0)) - run.stack < kStack) stop(__builtin_return_address(0), what);
  throw std::runtime_error(what);
}

void block_barrier(const Site& site, Memories memories) {
  const void* const where = __builtin_return_address(0);
  check_not_awaited(&site, where);
  if (run.done) stop(where, site, " after ", run.done, " threads of the block have left the kernel");
  if (run.at_barrier && !same(run.barrier, site))
    stop(where, site, " while other threads of the block wait at ", run.barrier);
  run.barrier = site;
  if (++run.at_barrier < run.threads.size()) return wait(kAtBlock);
  run.at_barrier = 0;
  run.block_time.set(memories, ++run.time);
  for (Thread& t : run.threads) {
    if (t.wait == kAtBlock) end_wait(t);
  }
}

void warp_barrier(const Site& site, Memories memories) {
  meet(true, memories, lane_index(), 0, site, __builtin_return_address(0));
}

void warp_exchange(unsigned mask, unsigned source_lane, void* value, size_t bytes, const Site& site) {
  const void* const where = __builtin_return_address(0);
  if (mask != lanes()) stop(where, site, ": the mask does not name exactly the lanes of the warp");
  if (warp_begin() + source_lane >= warp_end())
    stop(where, site, ": it reads lane ", source_lane, ", which does not exist");
  uint64_t bits = 0;
  memcpy(&bits, value, bytes);
  bits = meet(false, kNoMemory, source_lane, bits, site, where);
  memcpy(value, &bits, bytes);
}

void launch(const Launch& l) {
  const std::lock_guard<std::mutex> lock(run.mutex);
  const uint64_t blocks = l.grid.count(), threads = l.block.count();
  if (blocks > UINT32_MAX / 2 / threads) throw std::runtime_error("more threads than the emulator has numbers for");
  if (blocks * threads > UINT32_MAX - run.numbers_used) {  // no more numbers: accesses so far are forgotten
    const std::lock_guard<std::mutex> registry_lock(registry.mutex);
    for (auto& [_, m] : registry.live) free(std::exchange(m.shadow, nullptr));
    run.numbers_used = 1;
  }
  run.launch = &l;
  run.first_of_launch = run.numbers_used;
  run.numbers_used += uint32_t(blocks * threads);
  run.block_threads = uint32_t(threads);
  run.touched.clear();
  run.finding.clear();
  run.where = nullptr;
  run.host.stack = nullptr;
  // The launch is from another host thread, or the kernel is in another library.
  if (run.end_of_variables != uintptr_t(&end_of_variables) ||
      uintptr_t(l.kernel) - run.image_begin >= run.image_end - run.image_begin)
    find_images();
  const auto shared = uintptr_t(l.shared);
  run.shared.begin = run.dirty_begin = shared ? shared : run.variables;
  run.shared.end = run.dirty_end = shared ? shared + l.shared_bytes : run.end_of_variables;
  run.shared.shared = true;
  free(std::exchange(run.shared.shadow, nullptr));  // its size may have changed
  grid_size = l.grid;
  const Permutation order(blocks);
  for (uint64_t i = 0; i < blocks && run.finding.empty(); i++) {
    const uint64_t block = order(i);
    block_index = index_of(block, grid_size);
    run.first_of_block = uint32_t(run.first_of_launch + block * threads);
    run_block();
  }
  Record record{grid_size, {}};
  for (const Memory* m : run.touched)
    record.allocations.push_back({reinterpret_cast<const void*>(m->begin), m->loads, m->stores});
  run.records.push_back(record);
  if (run.records.size() > 1000) run.records.pop_front();
  std::string finding;
  if (!run.finding.empty()) {
    finding = join(run.finding, "; block ", block_index, ", thread ", thread_index);
    if (run.where) {
      for (const auto& line : describe(static_cast<const char*>(run.where) - 1, "-i")) finding += ", " + line;
    }
  }
  {
    const std::lock_guard<std::mutex> registry_lock(registry.mutex);
    for (const Memory* m : run.touched) {
      const std::string guard = check_guard(*m);
      if (finding.empty()) finding = guard;
    }
    if (finding.empty()) finding.swap(registry.finding);
  }
  if (finding.empty()) return;
  const auto name = describe(l.kernel, "-f");
  throw std::runtime_error(finding + "; " + (name.empty() ? "kernel" : name[0]));
}

void* allocate(size_t bytes) {
  const size_t all = padded(bytes) + 2 * kGuard;
  auto* const memory = static_cast<unsigned char*>(aligned_alloc(kGuard, all));
  if (!memory) throw std::bad_alloc();
  memset(memory, kPattern, all);
  memset(memory + kGuard, 0xff, bytes);
  ASAN_POISON_MEMORY_REGION(memory, kGuard);
  ASAN_POISON_MEMORY_REGION(memory + kGuard + bytes, all - kGuard - bytes);
  const auto begin = uintptr_t(memory) + kGuard;
  const std::lock_guard<std::mutex> lock(registry.mutex);
  registry.live[begin] = {begin, begin + bytes};
  return memory + kGuard;
}

void release(void* data) {
  const std::lock_guard<std::mutex> lock(registry.mutex);
  const auto found = registry.live.find(uintptr_t(data));
  if (found == registry.live.end()) return;
  const Memory m = found->second;
  registry.live.erase(found);
  const std::string finding = check_guard(m);
  if (registry.finding.empty()) registry.finding = finding;
  free(m.shadow);
  if (m.bytes() > kKept / 8) return give_back(m);
  memset(data, 0xff, m.bytes());
  ASAN_POISON_MEMORY_REGION(data, m.bytes());
  registry.freed.push_back(m);
  registry.freed_bytes += m.bytes() + 2 * kGuard;
  while (registry.freed_bytes > kKept) {
    registry.freed_bytes -= registry.freed.front().bytes() + 2 * kGuard;
    give_back(registry.freed.front());
    registry.freed.pop_front();
  }
}

void check_guards() {
  const std::lock_guard<std::mutex> lock(registry.mutex);
  std::string finding;
  finding.swap(registry.finding);
  for (const auto& [_, m] : registry.live) {
    const std::string guard = check_guard(m);
    if (finding.empty()) finding = guard;
  }
  if (!finding.empty()) throw std::runtime_error(finding);
}

std::vector<Record> last_launches() {
  const std::lock_guard<std::mutex> lock(run.mutex);
  const auto records = std::exchange(run.records, {});
  return {records.begin(), records.end()};
}

}  // namespace emulator

// The functions that -fsanitize=thread and the other sanitizers call in the kernels' code. They are defined here
// because the sanitizers' own libraries are not linked.
#ifndef __SANITIZE_ADDRESS__
extern "C" {
#define WHERE __builtin_return_address(0)
#define ACCESS(n, width)                                                              \
  void __tsan_read##n(void* p) { emulator::access(p, n, false, width, WHERE); }       \
  void __tsan_write##n(void* p) { emulator::access(p, n, true, width, WHERE); }       \
  void __tsan_unaligned_read##n(void* p) { emulator::access(p, n, false, 5, WHERE); } \
  void __tsan_unaligned_write##n(void* p) { emulator::access(p, n, true, 5, WHERE); }
ACCESS(1, 0)
ACCESS(2, 1)
ACCESS(4, 2)
ACCESS(8, 3)
ACCESS(16, 4)
void __tsan_read_range(void* p, size_t n) { emulator::access(p, n, false, 5, WHERE); }
void __tsan_write_range(void* p, size_t n) { emulator::access(p, n, true, 5, WHERE); }
void __tsan_init() {}
// clang calls these.
void* __tsan_memcpy(void* to, const void* from, size_t n) {
  if (n) emulator::access(const_cast<void*>(from), n, false, 5, WHERE), emulator::access(to, n, true, 5, WHERE);
  return memcpy(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, size_t n) {
  if (n) emulator::access(const_cast<void*>(from), n, false, 5, WHERE), emulator::access(to, n, true, 5, WHERE);
  return memmove(to, from, n);
}
void* __tsan_memset(void* to, int value, size_t n) {
  if (n) emulator::access(to, n, true, 5, WHERE);
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
#endif
