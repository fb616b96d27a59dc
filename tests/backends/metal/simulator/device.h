// What the device "mps" (device.cpp) needs of the simulated Metal (runtime.mm).
#pragma once

#include <cstddef>

void* simulated_buffer(size_t bytes);  // an id<MTLBuffer>
void simulated_release(void* buffer);
void* simulated_contents(const void* buffer);  // null for no buffer
void simulated_synchronize();                  // on the stream's queue, as everything that reads on the host does
