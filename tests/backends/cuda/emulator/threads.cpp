// Runs the threads of each block in turn, on a stack each, until they wait for each other or leave the kernel. When all
// do, those continue that have met.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <span>

#include "run.h"

namespace emulator {

Size3 thread_index, block_index, block_size, grid_size;

namespace {

// ---- stacks ----

// Saves the registers and the stack pointer, and continues where another stack has saved them.
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

// Returns the stack of a thread of the block. An access below it ends the process.
char* stack_of(uint32_t thread) {
  static std::vector<char*> stacks;
  while (stacks.size() <= thread) {
    void* const memory =
        mmap(nullptr, kStack + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, 4096, PROT_NONE)) abort();
    stacks.push_back(static_cast<char*>(memory) + 4096);
  }
  return stacks[thread];
}

// The running thread waits, or leaves the kernel.
void pause(State state) {
  Thread& me = run.threads[run.thread];
  me.state = state;
  emulator_switch(&me.top, run.host);
}

void run_thread() {
  run.launch->call(run.launch->arguments);
  leave();
}

// Runs a thread until it pauses.
void resume(uint32_t thread) {
  Thread& t = run.threads[thread];
  char* const stack = stack_of(thread);
  if (!t.top) {
    void** p = reinterpret_cast<void**>(stack + kStack);
    *--p = nullptr;  // the return address of run_thread(), which never returns; it also aligns its frame
    *--p = reinterpret_cast<void*>(run_thread);
    t.top = p - 6;
  }
  run.thread = thread;
  run.stack = uintptr_t(stack);
  thread_index = index_of(thread, block_size);
  emulator_switch(&run.host, t.top);
  run.stack = 0;
}

// ---- barriers and exchanges ----

using Threads = std::span<Thread>;

// Returns the threads of a warp of the block.
Threads warp(size_t number) {
  const Threads block(run.threads);
  return block.subspan(number * 32, std::min<size_t>(32, block.size() - number * 32));
}

// Returns at what all of some threads wait, which is the same call: kLeft if all have left the kernel. Lanes may leave
// before a barrier of their warp. Else this is a finding.
State meeting(Threads threads) {
  const auto first = std::ranges::find_if(threads, [](const Thread& t) { return t.state != kLeft; });
  if (first == threads.end()) return kLeft;
  for (const Thread& t : threads) {
    const bool there =
        t.state == first->state && t.site.line == first->site.line && !strcmp(t.site.file, first->site.file);
    if (there || (t.state == kLeft && first->state == kAtWarpBarrier)) continue;
    thread_index = index_of(&*first - run.threads.data(), block_size);
    run.finding = join(first->site, " waits for thread ", index_of(&t - run.threads.data(), block_size));
    run.finding += t.state == kLeft ? ", which has left the kernel" : join(", which is at ", t.site);
    return kReady;
  }
  return first->state;
}

// Lets the threads continue that have met.
void part(Threads threads, Times& times) {
  for (Thread& t : threads) {
    if (t.state == kLeft) continue;
    for (const int shared : {0, 1}) {
      if (t.memories >> shared & 1) times.of[shared] = run.time;
    }
    if (t.state == kAtExchange) t.result = threads[t.source].value;
    t.state = kReady;
  }
}

// Lets all threads continue that have met, if there are any. A block meets when none of its warps does.
bool end_meetings() {
  run.time++;
  bool any = false;
  for (size_t i = 0; i < run.warp_times.size(); i++) {
    const State state = meeting(warp(i));
    if (state != kAtWarpBarrier && state != kAtExchange) continue;
    part(warp(i), run.warp_times[i]);
    any = true;
  }
  if (any || meeting(run.threads) != kAtBlockBarrier) return any;
  part(run.threads, run.block_time);
  return true;
}

// The running thread waits at a call. All threads that wait for each other must be at the same one.
Thread& meet(State state, const Site& site, Memories memories, unsigned source = 0, uint64_t value = 0) {
  Thread& me = run.threads[run.thread];
  me.site = site;
  me.memories = memories;
  me.source = source;
  me.value = value;
  pause(state);
  return me;
}

// ---- blocks ----

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

void run_block() {
  block_size = size_of(block_index);
  const size_t count = block_size.count();
  run.threads.assign(count, {});
  run.warp_times.assign((count + 31) / 32, {});
  run.block_time = {};
  run.time = 0;
  run.last = &run.shared;
  if (run.dirty.end) memset(reinterpret_cast<void*>(run.dirty.begin), 0xff, run.dirty.bytes());
  run.dirty = {UINTPTR_MAX, 0};
  run.executed.clear();
  run.lines.clear();
  const Permutation order(count);
  do {
    for (uint64_t i = 0; i < count && run.finding.empty(); i++) {
      const auto thread = uint32_t(order(i));
      if (run.threads[thread].state == kReady) resume(thread);
    }
  } while (run.finding.empty() && end_meetings());
}

}  // namespace

void run_blocks() {
  const uint64_t blocks = grid_size.count();
  const Permutation order(blocks);
  for (uint64_t i = 0; i < blocks && run.finding.empty(); i++) {
    const uint64_t block = order(i);
    block_index = index_of(block, grid_size);
    run.first_of_block = uint32_t(1 + block * run.launch->block.count());
    run_block();
  }
}

void leave() {
  pause(kLeft);
  abort();  // not reached
}

Size3 size_of(const Size3& block) {
  const auto axis = [](unsigned at, unsigned full, unsigned threads) {
    return threads ? std::min(full, threads - at * full) : full;
  };
  const Size3 &full = run.launch->block, &threads = run.launch->threads;
  return {axis(block.x, full.x, threads.x), axis(block.y, full.y, threads.y), axis(block.z, full.z, threads.z)};
}

unsigned lane_index() { return run.thread % 32; }
unsigned lanes() { return ~0u >> (32 - warp(run.thread / 32).size()); }
void wait_for_previous_launch() { run.threads[run.thread].waited = true; }

void block_barrier(const Site& site, Memories memories) { meet(kAtBlockBarrier, site, memories); }
void warp_barrier(const Site& site, Memories memories) { meet(kAtWarpBarrier, site, memories); }
void warp_exchange(unsigned mask, unsigned source, void* value, size_t bytes, const Site& site) {
  const void* const where = __builtin_return_address(0);
  if (mask != lanes()) stop(where, site, ": the mask does not name exactly the lanes of the warp");
  if (source >= 32 || !(mask >> source & 1)) stop(where, site, ": it reads lane ", source, ", which does not exist");
  uint64_t bits = 0;
  memcpy(&bits, value, bytes);
  memcpy(value, &meet(kAtExchange, site, kNoMemory, source, bits).result, bytes);
}

}  // namespace emulator
