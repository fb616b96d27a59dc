// What the files of the emulator share: the allocations, and the launch that runs.
#pragma once

#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "emulator.h"

namespace emulator {

inline std::string text(const std::string& s) { return s; }
inline std::string text(const char* s) { return s; }
inline std::string text(uint64_t n) { return std::to_string(n); }
inline std::string text(const Size3& s) { return "(" + text(s.x) + ", " + text(s.y) + ", " + text(s.z) + ")"; }
inline std::string text(const Site& s) { return text(s.what) + " in line " + text(s.line) + " of " + s.file; }
template <typename... T>
std::string join(const T&... parts) {
  return (std::string() + ... + text(parts));
}

// ---- memory.cpp: the allocations ----

enum Kind { kLive, kFreed, kShared };
struct Memory {
  uintptr_t begin = 0, end = 0;
  Kind kind = kLive;

  size_t bytes() const { return end - begin; }
  bool holds(uintptr_t a, size_t n) const { return a >= begin && a + n <= end; }
  // Returns how many bytes lie between an address and this memory.
  uintptr_t distance(uintptr_t a) const { return a < begin ? begin - a : a < end ? 0 : a - end; }
  // Describes where an address is, such as "8 bytes before the start of an allocation of 1024 bytes".
  std::string place(uintptr_t a) const;
};
constexpr size_t kGuard = 64;  // bytes of the guard on each side of an allocation

// Returns the allocation, live or freed, that is nearest to an address.
Memory nearest_allocation(uintptr_t);
// Returns a finding if a guard was written since the last call, else an empty string.
std::string written_guard();

// ---- accesses.cpp: the memory that a launch touches ----

// Past accesses to some bytes. `thread` is the last thread, by a number that is unique in the launch, or 0 if there was
// no access. `time` is that of the last access: the number of rounds of barriers that the block had passed. `threads`
// is the smallest group of all threads whose accesses no barrier orders before the last one.
enum Group : uint32_t { kOneThread, kOneWarp, kOneBlock, kGrid };
struct Past {
  uint32_t thread, time : 30, threads : 2;
};
struct Access {
  Past write, reads;  // the last write, and the reads since then
};

struct Touched : Memory {
  bool writable = true;
  Accesses loads{}, stores{};
  // One Access for every `granule` bytes: 16, or fewer as soon as there is a smaller access.
  std::shared_ptr<Access[]> shadow;
  size_t granule = 0;
};

// ---- threads.cpp: threads that wait for each other ----

constexpr size_t kStack = 256 * 1024;  // bytes of a thread's stack

enum State { kReady, kAtBlockBarrier, kAtWarpBarrier, kAtExchange, kLeft };
struct Thread {
  void* top = nullptr;  // of its stack, while it does not run
  State state = kReady;
  bool waited = false;  // for the previous launch
  // What it waits at:
  Site site{};
  Memories memories = kNoMemory;
  unsigned source = 0;  // the lane whose value it gets
  uint64_t value = 0, result = 0;
};
struct Times {
  uint32_t of[2] = {};  // of the last barrier that orders other memory, and of the last that orders shared memory
};

void run_blocks();  // until a thread makes a mistake
// Ends the running thread, and never continues it.
[[noreturn]] void leave();

// ---- the launch that runs ----

struct Run {
  const Launch* launch = nullptr;
  Touched shared;
  Memory dirty;                // the part of `shared` that the last block has accessed
  std::deque<Touched> others;  // allocations that the launch has touched
  Touched* last = nullptr;     // the memory of the last access, which is looked up first
  Memory image;                // the loaded library of the kernel, which has its constants

  uintptr_t stack = 0;          // of the running thread; 0 while no kernel runs
  void* host = nullptr;         // the top of the stack of the code that called launch()
  std::vector<Thread> threads;  // of the block
  uint32_t thread = 0;          // the running one
  uint32_t first_of_block = 1;  // the unique number of the block's first thread
  uint32_t time = 0;
  Times block_time;
  std::vector<Times> warp_times;

  // If options.lines is set: how often a thread of the block has executed an instruction, and the lines that were
  // counted, each with a warp, an instruction and how often that had been executed before.
  std::map<std::pair<uint32_t, const void*>, uint32_t> executed;
  std::set<std::tuple<uint32_t, const void*, uint32_t, Accesses*, uint64_t>> lines;

  std::string finding;
  const void* where = nullptr;  // the return address of the finding in the kernel
};
extern Run run;

// The host runs instrumented code too, but not on the stack of a thread.
inline bool in_kernel() { return uintptr_t(__builtin_frame_address(0)) - run.stack < kStack; }

// Ends the launch with a finding.
template <typename... T>
[[noreturn, gnu::noinline]] void stop(const void* where, const T&... what) {
  // Ignores accesses, because the linker may take an instrumented copy of std::string from a kernel's object file.
  run.stack = 0;
  run.finding = join(what...);
  run.where = where;
  leave();
}

// Returns the index on three axes of the i-th element of a grid of this size.
inline Size3 index_of(uint64_t i, const Size3& size) {
  return {unsigned(i % size.x), unsigned(i / size.x % size.y), unsigned(i / size.x / size.y)};
}
// Returns the size of the block with this index, which may be smaller at the edge of the grid.
Size3 size_of(const Size3& block);

}  // namespace emulator
