// Runs compute kernels that were compiled as C++: the threads of a grid one after another, as fibers where they wait
// for each other, with every load and store looked at. A block is CUDA's thread block or Metal's threadgroup, a warp 32
// threads of it. What is wrong is a std::runtime_error, thrown by launch().
//
// Not seen: memcpy, unless of 1, 2, 4, 8 or 16 bytes (copies of structs are), which of two shared
// variables side by side was meant, how many there are for one kernel, and races between the lanes of a warp barrier
// and the other lanes of the warp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace emulator {

struct Size3 {
  unsigned x, y, z;
  constexpr Size3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  constexpr uint64_t count() const { return uint64_t(x) * y * z; }
};

// Of the thread that runs.
extern Size3 thread_index, block_index, block_size, grid_size;
unsigned lane_index();

struct Launch {
  Size3 grid, block;
  size_t dynamic_shared;                // bytes
  const void* kernel;                   // its address, for its name
  void (*call)(const void* arguments);  // runs it for one thread
  const void* arguments;
};
void launch(const Launch&);

// Where threads wait for each other: all at the same place.
struct Site {
  const char *what, *file;
  int line;
};
void block_barrier(const Site&);
// The lanes named in the mask wait for each other. A barrier orders their accesses, an exchange does not. Lanes that
// have left the kernel, or do not exist, may be named at a barrier only.
void warp_barrier(unsigned mask, const Site&);
void warp_exchange(unsigned mask, unsigned source_lane, void* value, size_t bytes, const Site&);  // at most 8 bytes

[[noreturn]] void fail(const char* what);  // ends the launch

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
struct Record {
  const void* kernel;
  Size3 grid, block;
  struct {
    uint64_t bytes, count[6];  // accesses of 1, 2, 4, 8 and 16 bytes, and others
  } loads, stores;
};
std::vector<Record> last_launches(bool clear);  // at most 1000
std::string name_of(const void* kernel);

}  // namespace emulator
