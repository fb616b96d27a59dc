// What kernels ask of the emulator.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emulator {

struct Size3 {
  unsigned x, y, z;
  constexpr Size3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  constexpr uint64_t count() const { return uint64_t(x) * y * z; }
};

// Of the thread that runs. A block at the edge of the grid may be smaller than others, see Launch.
extern Size3 thread_index, block_index, block_size, grid_size;
unsigned lane_index();
unsigned lanes();  // a mask of those that exist in its warp

// Where threads wait for each other: all at the same place.
struct Site {
  const char *what, *file;
  int line;
};
// A barrier may order accesses to shared memory alone, to other memory alone, or none.
enum Memories : unsigned { kNoMemory = 0, kOtherMemory = 1, kSharedMemory = 2, kAllMemory = 3 };
void block_barrier(const Site&, Memories = kAllMemory);
// The lanes named in the mask wait for each other. A barrier orders their accesses, an exchange does not. Lanes that
// have left the kernel, or do not exist, may be named at a barrier only.
void warp_barrier(unsigned mask, const Site&, Memories = kAllMemory);
void warp_exchange(unsigned mask, unsigned source_lane, void* value, size_t bytes, const Site&);  // at most 8 bytes

[[noreturn]] void fail(const char* what);  // ends the launch

}  // namespace emulator
