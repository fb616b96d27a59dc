// Stands in for the GPU, which executes the commands that runtime.mm has encoded: metal.py compiles a shader library;
// a dispatch is checked as Metal's own validation would check it, and the grid emulator runs it. Every mistake is
// thrown as a std::runtime_error.
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
  std::vector<Derived> derived;
};
const Library* compile(const std::string& source, bool fast_math);  // once, and never unloaded

struct Value {
  int type;  // MTLDataType
  std::string bytes;
};
using Values = std::map<size_t, Value>;  // of function constants, by index
struct Pipeline {
  const Library* library = nullptr;
  const Kernel* kernel = nullptr;
  Values constants;
  std::vector<bool> absent;  // for each parameter, whether the function constants leave it out
};
Pipeline pipeline(const Library&, const std::string& kernel, const Values& constants);

// Memory that can be bound for a kernel. Large buffers are sparse, and the emulator does not know them.
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
  int pipeline = 0;  // how many pipelines had been set before this binding was made
};
constexpr int kBindings = 31;
struct Dispatch {
  Pipeline pipeline;
  int pipelines = 0;  // how many pipelines were set in this encoder
  Binding buffers[kBindings];
  size_t threadgroup_memory[kBindings] = {};
  std::map<std::string, int> messages;  // how many messages of each name the encoder got since the previous dispatch
  size_t threads[3], group[3];
};
void validate(const Dispatch&);
void run(const Dispatch&);

constexpr size_t kThreadgroupMemory = 32 * 1024;
extern size_t max_threads;                // the largest threadgroup that a pipeline allows
std::string last_dispatches(bool clear);  // a list in JSON

[[noreturn]] void fail(const std::string&);

}  // namespace simulator
