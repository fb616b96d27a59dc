// What a shader library, compiled as C++14, and the simulator say to each other.
#pragma once

#include <cstddef>

#include "../../cuda/emulator/grid.h"

namespace simulator {

// [[buffer(0)]], [[thread_position_in_grid]] and so on, by name with a k before it.
enum Attribute {
  kbuffer,
  kthreadgroup,
  kthread_position_in_grid,
  kthread_position_in_threadgroup,
  kthreadgroup_position_in_grid,
  kthreads_per_threadgroup,
  kdispatch_threads_per_threadgroup,
  kthreads_per_grid,
  kthreadgroups_per_grid,
  kthread_index_in_threadgroup,
  kthread_index_in_simdgroup,
  ksimdgroup_index_in_threadgroup,
  ksimdgroups_per_threadgroup,
  kthreads_per_simdgroup,
};

struct Parameter {
  Attribute attribute;
  int index;
};
struct Type {
  unsigned size, alignment;  // of what it points or refers to
  bool pointer, reference, writable;
};

struct Call;
struct Kernel {
  static const int kMost = 31;  // parameters
  const char* name;
  void (*function)();
  void (*call)(const Call&);
  int count;
  Parameter parameters[kMost];
  Type types[kMost];
};
struct Call {
  const Kernel* kernel;
  emulator::Size3 group, threads;  // the size of a full threadgroup, and of the grid
  void* data[Kernel::kMost];       // what parameters point or refer to
};
unsigned value(const Call&, Attribute, int axis);  // of the thread that runs

struct Constant {
  const char* name;
  int index, type;  // MTLDataType
  void* data;
  size_t size;
};

float rint(float);  // counts

}  // namespace simulator
