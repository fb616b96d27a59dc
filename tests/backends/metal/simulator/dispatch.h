// What a GPU does with the commands that runtime.mm has encoded: a shader library is compiled by metal.py, and a
// dispatch is checked as Metal's own validation would, and run by the grid emulator. What is wrong is a
// std::runtime_error.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "../../cuda/emulator/emulator.h"
#include "library.h"

namespace simulator {

struct Library {
  std::map<std::string, const Kernel*> kernels;
  std::vector<Constant> constants;
};
const Library* compile(const std::string& source, bool fast_math);  // never unloaded

struct Value {
  int type;  // MTLDataType
  std::string bytes;
};
using Values = std::map<size_t, Value>;  // of function constants
struct Pipeline {
  const Library* library = nullptr;
  const Kernel* kernel = nullptr;
  Values constants;
};
// Why there is no such function; empty: there is.
std::string problem(const Library&, const std::string& kernel, const Values& constants);

// Memory that a kernel may be given. Large ones are sparse, and unknown to the emulator.
class Buffer {
 public:
  explicit Buffer(size_t bytes);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  const size_t bytes;
  char* const data;
};

struct Binding {
  enum { kUnset, kNil, kBuffer, kBytes } what = kUnset;
  std::shared_ptr<Buffer> memory;
  size_t offset = 0;
  int pipeline = 0;  // how many had been set before it was
};
constexpr int kBindings = 31;
struct Dispatch {
  Pipeline pipeline;
  int pipelines = 0;  // that were set
  Binding buffers[kBindings];
  size_t threadgroup_memory[kBindings] = {};
  size_t threads[3], group[3];
};
void validate(const Dispatch&);
void run(const Dispatch&);

constexpr size_t kThreadgroupMemory = 32 * 1024;
extern size_t max_threads;                // of a threadgroup
std::string last_dispatches(bool clear);  // a list, in JSON

[[noreturn]] void fail(const std::string&);

}  // namespace simulator
