// The interface between the simulator and a shader library, which is compiled as C++14.
#pragma once

#include <cstddef>

#include "../../cuda/emulator/grid.h"

namespace simulator {

// The attributes of parameters, such as [[buffer(0)]] and [[thread_position_in_grid]]: k and the name of the attribute.
enum Attribute {
  kbuffer,
  kthreadgroup,
  kthread_position_in_grid,
  kthreadgroup_position_in_grid,
  kthreads_per_threadgroup,
  kthreads_per_grid,
  kthreadgroups_per_grid,
  kthread_index_in_threadgroup,
  kthread_index_in_simdgroup,
  ksimdgroup_index_in_threadgroup,
};

struct Parameter {
  Attribute attribute;
  int index;
  const bool* present;  // the function constant that says whether the argument exists; null if it always does
};
struct Type {
  unsigned size, alignment;  // of the object that the parameter points or refers to
  bool pointer, reference, writable;
};

struct Call;
struct Kernel {
  static const int kMost = 31;  // the largest number of parameters
  const char* name;
  unsigned max_threads;  // of a threadgroup: max_total_threads_per_threadgroup, or 1024
  void (*function)();
  void (*call)(const Call&);
  int count;
  Parameter parameters[kMost];
  Type types[kMost];
};
struct Call {
  const Kernel* kernel;
  emulator::Size3 group, threads;  // the size of a full threadgroup, and of the grid
  void* data[Kernel::kMost];       // the addresses that the parameters point or refer to
};
// Returns the value that a parameter with this attribute has in the thread that runs.
unsigned value(const Call&, Attribute, int axis);

struct Constant {
  const char* name;
  int index;
  int* data;
};
// A program-scope constant that is computed from function constants.
struct Derived {
  const char* name;
  void (*compute)();
};

float rint(float);  // counts its calls

}  // namespace simulator
