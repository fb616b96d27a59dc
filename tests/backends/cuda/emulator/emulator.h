// Runs compute kernels that were compiled as C++, and checks every load and store. The threads of a grid run one after
// another, each on its own stack, until they wait for each other. "Block" is short for CUDA's thread block or Metal's
// threadgroup, and a warp is 32 threads of it. If a kernel makes a mistake, launch() throws a std::runtime_error that
// describes it.
//
// Some mistakes are not noticed:
// - accesses by memcpy in code compiled with g++, unless of 1, 2, 4, 8 or 16 bytes (copies of structs are noticed);
// - an access to one shared variable that hits its neighbour;
// - more shared variables than one kernel may have;
// - races between the lanes of a warp barrier and the other lanes of the warp.
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
  const void* kernel;                   // its address, from which its name and its library's constants are found
  void (*call)(const void* arguments);  // runs the kernel for one thread
  const void* arguments;
  bool dependent;             // the kernel may begin before the previous one has ended, see wait_for_previous_launch()
  Size3 threads = {0, 0, 0};  // of the grid on each axis, if the last block is not full; else 0
  const std::vector<Bound>* bound = nullptr;  // if given, the only memory from allocate() that the kernel may touch
  void* shared = nullptr;                     // the shared memory of a thread block; if null, the shared variables
  size_t shared_bytes = 0;
};
// The shared variables are the thread_local variables of the kernels' object files, which must be linked before
// launch.o.
void launch(const Launch&);

// Allocates memory that kernels may touch. It has guards on both sides, and every byte is 0xff at first.
void* allocate(size_t bytes);
// Frees memory from allocate(). If a guard was written, check_guards() or the next launch throws an error.
void release(void*);
void check_guards();

enum class Order { kForward, kBackward, kScrambled };
struct Options {
  bool foreign = false;           // kernels may touch memory that is not from allocate()
  bool lines = false;             // count the lines of memory that warps touch, see Accesses
  Order order = Order::kForward;  // of the blocks, and of the threads in each block
};
extern Options options;

// The accesses of a launch to memory from allocate(). Only code whose loads and stores are instrumented is counted.
struct Accesses {
  uint64_t bytes, count[6];  // counts of accesses of 1, 2, 4, 8 and 16 bytes, and of others
  // If options.lines is set: the sum, over the instructions that warps execute, of the number of lines of 128 bytes
  // that the threads of the warp touch in that instruction. Lines are counted from the start of an allocation.
  uint64_t lines;
};
struct Record {
  Size3 grid;
  struct Allocation {
    const void* data;
    Accesses loads, stores;
  };
  std::vector<Allocation> allocations;  // those that the kernel touched
};
std::vector<Record> last_launches();  // those since the last call, but at most the last 1000

}  // namespace emulator
