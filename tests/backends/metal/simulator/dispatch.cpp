#include "dispatch.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>
#include <xmmintrin.h>

#include <cstdio>
#include <cstring>
#include <deque>
#include <fstream>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace simulator {

size_t max_threads = 1024;
std::atomic<int> compilations = 0;

namespace {

alignas(128) char threadgroup_memory[kThreadgroupMemory];

constexpr size_t kSparse = size_t(256) << 20;  // buffers of more bytes are sparse

uint64_t rints = 0;  // calls of rint by the dispatch that runs
// Held by the dispatch that runs. Only one may run at a time, because function constants are variables of the library.
std::mutex mutex;
std::deque<std::string> records;

// The records are literals of Python, in which a list may end with a comma.
std::string text_of(const emulator::Accesses& a, const std::string& done, const char* counts) {
  std::ostringstream out;
  out << "'bytes_" << done << "': " << a.bytes << ", 'lines_" << done << "': " << a.lines << ", '" << counts << "': {";
  for (int i = 0; i < 6; i++) {
    if (a.count[i]) out << (i < 5 ? 1 << i : 0) << ": " << a.count[i] << ", ";
  }
  return out.str() + "}, ";
}

// Gives the function constants of a library, and the constants that are computed from them, the values of a pipeline.
void set_constants(const Pipeline& p) {
  for (const Constant* c = p.library->constants; c->name; c++) *c->data = p.constants.at(size_t(c->index));
  for (const Derived* d = p.library->derived; d->name; d++) d->compute();
}

// Returns how many threadgroups a dispatch has on an axis.
size_t groups(const Dispatch& d, int axis) { return (d.threads[axis] + d.group[axis] - 1) / d.group[axis]; }

// Records the emulator's last launch. A buffer that is bound twice is recorded twice, with the same numbers.
void record(const Dispatch& d) {
  const auto launches = emulator::last_launches();
  const Kernel& k = *d.pipeline.kernel;
  std::ostringstream out;
  const auto size = [&](const char* name, auto of) {
    out << "'" << name << "': [" << of(0) << ", " << of(1) << ", " << of(2) << "], ";
  };
  out << "{'kernel': '" << k.name << "', 'source': '" << d.pipeline.library->source << "', 'rints': " << rints << ", ";
  out << "'constants': {";
  for (const auto& [index, value] : d.pipeline.constants) out << index << ": " << value << ", ";
  out << "}, ";
  size("threads", [&](int axis) { return d.threads[axis]; });
  size("group", [&](int axis) { return d.group[axis]; });
  size("groups", [&](int axis) { return groups(d, axis); });
  out << "'messages': {";
  for (const auto& [name, count] : d.messages) out << "'" << name << "': " << count << ", ";
  out << "}, 'buffers': {";
  for (int i = 0; i < k.count; i++) {
    if (k.parameters[i].attribute != kbuffer || d.pipeline.absent[i] || launches.empty()) continue;
    const Buffer& buffer = *d.buffers[k.parameters[i].index].memory;
    emulator::Accesses loads{}, stores{};
    for (const auto& a : launches.back().allocations) {
      if (a.data == buffer.data) loads = a.loads, stores = a.stores;
    }
    out << k.parameters[i].index << ": {'bytes': " << buffer.bytes << ", " << text_of(loads, "read", "loads")
        << text_of(stores, "written", "stores") << "}, ";
  }
  records.push_back(out.str() + "}}, ");
  if (records.size() > 1000) records.pop_front();
}

// Makes denormals zero, as a GPU does.
struct FlushDenormals {
  const unsigned before = _mm_getcsr();
  FlushDenormals() { _mm_setcsr(before | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(before); }
};

}  // namespace

void fail(const std::string& what) { throw std::runtime_error("simulated Metal: " + what); }

// ---- shader libraries ----

const Library* compile(const std::string& source) {
  compilations++;
  static std::map<std::string, const Library*> all;
  const Library*& known = all[source];
  if (known) return known;
  Dl_info here;
  dladdr(reinterpret_cast<const void*>(&compile), &here);
  const std::string library = here.dli_fname, folder = library.substr(0, library.rfind('/')) + "/shaders";
  char input[] = "/tmp/shader.XXXXXX";
  close(mkstemp(input));
  std::ofstream(input) << source;
  FILE* const out = popen((SIMULATOR_COMPILER " '" + folder + "' '" + library + "' < " + input + " 2>&1").c_str(), "r");
  std::string text;
  for (char part[4096]; const size_t n = fread(part, 1, sizeof part, out);) text.append(part, n);
  const bool failed = pclose(out);
  unlink(input);
  if (failed) fail(text);
  const std::string path = text.substr(0, text.find('\n'));
  void* const opened = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!opened) fail(dlerror());
  return known = new Library{path.substr(0, path.rfind('/')) + "/program_source",
                             static_cast<const Kernel*>(dlsym(opened, "simulator_kernels")),
                             static_cast<const Constant*>(dlsym(opened, "simulator_constants")),
                             static_cast<const Derived*>(dlsym(opened, "simulator_derived"))};
}

Pipeline pipeline(const Library& library, const std::string& kernel, const Values& constants) {
  const Kernel* found = library.kernels;
  while (found->name && found->name != kernel) found++;
  if (!found->name) fail("the library has no function " + kernel);
  for (const Constant* c = library.constants; c->name; c++) {
    if (!constants.count(size_t(c->index))) fail(std::string("function constant ") + c->name + " has no value");
  }
  Pipeline made{&library, found, constants, {}};
  const std::lock_guard<std::mutex> lock(mutex);
  set_constants(made);
  for (int i = 0; i < made.kernel->count; i++) {
    const bool* const present = made.kernel->parameters[i].present;
    made.absent.push_back(present && !*present);
  }
  return made;
}

size_t most_threads(const Pipeline& p) { return std::min<size_t>(max_threads, p.kernel->max_threads); }

// ---- memory ----

Buffer::Buffer(size_t bytes)
    : bytes(bytes),
      data(static_cast<char*>(bytes > kSparse ? mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                                                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
                                              : emulator::allocate(bytes))) {
  if (data == MAP_FAILED) throw std::bad_alloc();
}
Buffer::~Buffer() { bytes > kSparse ? void(munmap(data, bytes)) : emulator::release(data); }

// ---- dispatches ----

namespace {

template <typename... T>
[[noreturn]] void wrong(const Dispatch& d, const T&... what) {
  std::ostringstream out;
  out << d.pipeline.kernel->name << ": ";
  (out << ... << what);
  fail(out.str());
}

emulator::Size3 size_of(const size_t (&n)[3]) { return {unsigned(n[0]), unsigned(n[1]), unsigned(n[2])}; }

// Checks the sizes of the grid and of the threadgroups, as Metal's own validation does.
void check_sizes(const Dispatch& d) {
  const size_t group = d.group[0] * d.group[1] * d.group[2], most = most_threads(d.pipeline);
  if (!group) wrong(d, "the threadgroup is empty");
  if (group > most) wrong(d, "a threadgroup has ", group, " threads but must have at most ", most);
  for (const size_t threads : d.threads) {
    if (!threads) wrong(d, "the grid is empty");
    if (threads > UINT32_MAX)
      wrong(d, "the grid has ", threads, " threads on an axis but must have at most ", UINT32_MAX);
  }
}

// Checks a buffer of a kernel, as Metal's own validation does.
void check_buffer(const Dispatch& d, int index, const Type& type) {
  const Binding& b = d.buffers[index];
  if (!b.memory) wrong(d, "buffer ", index, " is not bound");
  if (b.pipeline != d.pipelines) wrong(d, "buffer ", index, " is left over from an earlier pipeline");
  const size_t bytes = b.memory->bytes - b.offset;
  if (b.offset % type.alignment) wrong(d, "byte offset ", b.offset, " of buffer ", index, " is misaligned");
  if (type.reference && (b.by_value ? bytes != type.size : bytes < type.size))
    wrong(d, "buffer ", index, " has ", bytes, " bytes but must have ", type.size, ", the size of the parameter");
  if (b.by_value && type.writable)
    wrong(d, "buffer ", index, " was set by setBytes but must be a real buffer, because the kernel may write it");
}

}  // namespace

void run(const Dispatch& d) {
  if (!d.pipeline.kernel) fail("no pipeline was set before the dispatch");
  check_sizes(d);
  const std::lock_guard<std::mutex> lock(mutex);
  const Kernel& k = *d.pipeline.kernel;
  set_constants(d.pipeline);
  Call call{&k, size_of(d.group), size_of(d.threads), {}};
  std::vector<emulator::Bound> bound;
  size_t shared = 0;
  for (int i = 0; i < k.count; i++) {
    const auto [attribute, index, _] = k.parameters[i];
    if (attribute == kthreadgroup) {
      if (!d.threadgroup_memory[index]) wrong(d, "threadgroup memory ", index, " has no length");
      call.data[i] = threadgroup_memory + shared;
      shared += d.threadgroup_memory[index];
    }
    if (attribute != kbuffer) continue;
    const Binding& b = d.buffers[index];
    if (d.pipeline.absent[i]) {
      if (b.memory && b.pipeline == d.pipelines)
        wrong(d, "buffer ", index, " is bound, but the function constants leave it out");
      continue;
    }
    check_buffer(d, index, k.types[i]);
    call.data[i] = b.memory->data + b.offset;
    bound.push_back({b.memory->data, k.types[i].writable});
  }
  if (shared > kThreadgroupMemory)
    wrong(d, "threadgroup memory has ", shared, " bytes but must have at most ", kThreadgroupMemory);
  size_t grid[3];
  for (int axis = 0; axis < 3; axis++) grid[axis] = groups(d, axis);
  rints = 0;
  emulator::last_launches();
  std::string finding;
  try {
    const FlushDenormals flush;
    emulator::launch({size_of(grid), call.group, reinterpret_cast<const void*>(k.function),
                      [](const void* c) { static_cast<const Call*>(c)->kernel->call(*static_cast<const Call*>(c)); },
                      &call, false, call.threads, &bound, threadgroup_memory, shared});
  } catch (const std::exception& error) {
    finding = error.what();
  }
  record(d);
  if (!finding.empty()) wrong(d, finding);
}

unsigned value(const Call& c, Attribute attribute, int axis) {
  const auto of = [&](const emulator::Size3& s) { return axis == 0 ? s.x : axis == 1 ? s.y : s.z; };
  const emulator::Size3 &at = emulator::thread_index, &size = emulator::block_size;
  const unsigned index = (at.z * size.y + at.y) * size.x + at.x;
  switch (attribute) {
    case kthread_position_in_grid:
      return of(emulator::block_index) * of(c.group) + of(at);
    case kthreadgroup_position_in_grid:
      return of(emulator::block_index);
    case kthreads_per_threadgroup:
      return of(size);
    case kthreads_per_grid:
      return of(c.threads);
    case kthreadgroups_per_grid:
      return of(emulator::grid_size);
    case kthread_index_in_threadgroup:
      return index;
    case kthread_index_in_simdgroup:
      return index % 32;
    case ksimdgroup_index_in_threadgroup:
      return index / 32;
    default:
      emulator::fail("a parameter that is no pointer has the attribute of a pointer");
  }
}

float rint(float x) {
  rints++;
  return __builtin_rintf(x);
}

std::string last_dispatches() {
  const std::lock_guard<std::mutex> lock(mutex);
  std::string all;
  for (const std::string& one : std::exchange(records, {})) all += one;
  return "[" + all + "]";
}

}  // namespace simulator

// Converts a float to a bfloat, rounded to nearest even. clang calls this function, and older compiler libraries do not
// have it. The result is the lower half of a floating-point register. Its type here is float, because clang would call
// this very function to make a bfloat.
extern "C" float __truncsfbf2(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  if (x == x) bits += 0x7fff + (bits >> 16 & 1);
  // A NaN keeps its bits, because clang may copy a bfloat as a float.
  bits = x != x && !(bits & 0x7f0000) ? 0x7fc0 : bits >> 16;
  memcpy(&x, &bits, sizeof bits);
  return x;
}
