// The functions of the simulated Metal (runtime.mm) that the device "mps" (device.cpp) uses.
#pragma once

#include <cstddef>
#include <string>

void* simulated_buffer(size_t bytes);  // returns an id<MTLBuffer>
void simulated_release(void* buffer);
void* simulated_contents(const void* buffer);  // null if there is no buffer
void simulated_synchronize();                  // enters the stream's queue, as every read by the host does
// Starts or stops torch's profiler. Returns the names of the kernels that it saw since the call before.
std::string simulated_profile(bool on);
