// The answer to what torch_rope.selfcheck asks about the kernels of this process.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace rope::mps {

struct PipelineInfo {
  std::string kernel;   // the name of a kernel; of the library that has it alone: "library" and this name
  double milliseconds;  // how long Metal took to make it
  std::int64_t calls;   // how often it was launched; 0 for a library
};
// Returns the libraries and pipelines that this process has made, in the order of their making.
std::vector<PipelineInfo> pipelines();

}  // namespace rope::mps
