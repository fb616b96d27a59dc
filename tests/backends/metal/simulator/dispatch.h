// Stands in for the GPU, which executes the commands that runtime.mm has encoded: metal.py compiles a shader library;
// a dispatch is checked as Metal's own validation would check it, and the grid emulator runs it. Every mistake is
// thrown as a std::runtime_error.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "../../cuda/emulator/emulator.h"
#include "library.h"

namespace simulator {

struct Library {
  std::string source;     // the path of the translated source
  const Kernel* kernels;  // these lists end with an element without a name
  const Constant* constants;
  const Derived* derived;
};
const Library* compile(const std::string& source);  // once, and never unloaded
extern std::atomic<int> compilations;               // how often compile() was called

using Values = std::map<size_t, int>;  // of function constants, by index
struct Pipeline {
  const Library* library = nullptr;
  const Kernel* kernel = nullptr;
  Values constants;
  std::vector<bool> absent;  // for each parameter, whether the function constants leave it out
};
Pipeline pipeline(const Library&, const std::string& kernel, const Values& constants);
size_t most_threads(const Pipeline&);  // maxTotalThreadsPerThreadgroup

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
  std::shared_ptr<Buffer> memory;  // null if nothing was bound
  size_t offset = 0;
  bool by_value = false;  // by setBytes
  int pipeline = 0;       // how many pipelines had been set before this binding was made
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
void run(const Dispatch&);  // checks and executes it

constexpr size_t kThreadgroupMemory = 32 * 1024;
extern size_t max_threads;      // the largest threadgroup that any pipeline allows
std::string last_dispatches();  // a list in Python of those since the call before, at most 1000

[[noreturn]] void fail(const std::string&);

}  // namespace simulator

// The functions of runtime.mm that the device "mps" (device.cpp) uses.
void* simulated_buffer(size_t bytes);  // returns an id<MTLBuffer>
void simulated_release(void* buffer);
void* simulated_contents(const void* buffer);  // null if there is no buffer
void simulated_synchronize();                  // enters the stream's queue, as every read by the host does
std::string simulated_profile(bool on);        // of simulator.py
