// The part of the emulator that kernels use: their index in the grid, barriers and exchanges between threads.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emulator {

struct Size3 {
  unsigned x, y, z;
  constexpr Size3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  constexpr uint64_t count() const { return uint64_t(x) * y * z; }
};

// The index of the running thread in its thread block, that of the thread block in the grid, and the sizes of both. A
// thread block at the edge of the grid may be smaller than the others, see Launch.
extern Size3 thread_index, block_index, block_size, grid_size;
unsigned lane_index();
unsigned lanes();  // a mask of the lanes that exist in the thread's warp

// The call in the source at which threads wait for each other. All of them must wait at the same one.
struct Site {
  const char *what, *file;
  int line;
};
// The memories whose accesses a barrier orders.
enum Memories : unsigned { kNoMemory = 0, kOtherMemory = 1, kSharedMemory = 2, kAllMemory = 3 };
void block_barrier(const Site&, Memories = kAllMemory);
// The lanes of a warp wait for each other. A barrier orders their accesses, an exchange does not. Lanes may have left
// the kernel before a barrier, but not before an exchange, whose mask must name all lanes of the warp: those of
// lanes(). It replaces the value, which has at most 8 bytes, by that of the source lane.
void warp_barrier(const Site&, Memories = kAllMemory);
void warp_exchange(unsigned mask, unsigned source_lane, void* value, size_t bytes, const Site&);

// The running thread waits until the previous launch has ended. A thread of a dependent launch must call it before it
// touches memory that other threads share.
void wait_for_previous_launch();

[[noreturn]] void fail(const char* what);  // ends the launch

}  // namespace emulator
