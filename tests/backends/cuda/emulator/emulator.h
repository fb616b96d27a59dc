// Runs compute kernels that were compiled as C++: the threads of a grid one after another, as fibers where they wait
// for each other, with every load and store looked at. A block is CUDA's thread block or Metal's threadgroup, a warp 32
// threads of it. What is wrong is a std::runtime_error, thrown by launch().
//
// Not seen: with g++ memcpy, unless of 1, 2, 4, 8 or 16 bytes (copies of structs are), which of two shared
// variables side by side was meant, how many there are for one kernel, and races between the lanes of a warp barrier
// and the other lanes of the warp.
#pragma once

#include <string>
#include <vector>

#include "grid.h"

namespace emulator {

struct Bound {
  const void* data;  // from allocate()
  bool writable;
};
struct Launch {
  Size3 grid, block;
  size_t dynamic_shared;                // bytes
  const void* kernel;                   // its address: for its name, and for the constants beside it
  void (*call)(const void* arguments);  // runs it for one thread
  const void* arguments;
  Size3 threads = {0, 0, 0};                  // on each axis, where the last block is not full
  const std::vector<Bound>* bound = nullptr;  // all that the kernel may touch of what is from allocate()
};
void launch(const Launch&);

// Shared variables are the thread_local ones of the kernels' object files, which are linked before emulator.o. This
// much is there for a launch to give.
constexpr size_t kDynamicShared = 48 * 1024;

// Memory that kernels may touch: guarded on both sides, and every byte 0xff at first.
void* allocate(size_t bytes);
void release(void*);  // where a guard was written, check_guards() or the next launch tells
void check_guards();

enum class Order { kForward, kBackward, kScrambled };
struct Options {
  bool races = true;              // look for races on what is from allocate(); always on shared memory
  bool foreign = false;           // kernels may touch memory that is not from allocate()
  Order order = Order::kForward;  // of the blocks, and of the threads in each
};
extern Options options;

// What a launch did with memory from allocate(), where loads and stores are instrumented.
struct Accesses {
  uint64_t bytes, count[6];  // accesses of 1, 2, 4, 8 and 16 bytes, and others
};
struct Record {
  const void* kernel;
  Size3 grid, block;
  Accesses loads, stores;
  struct Allocation {
    const void* data;
    Accesses loads, stores;
  };
  std::vector<Allocation> allocations;  // that were touched
};
std::vector<Record> last_launches(bool clear);  // at most 1000
std::string name_of(const void* kernel);

}  // namespace emulator
