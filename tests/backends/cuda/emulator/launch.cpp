// Launches kernels, and describes what they did.
#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <stdexcept>

#include "run.h"

namespace emulator {

Options options;
Run run;

namespace {

// The end of the shared variables. Every thread_local that is linked before this one is taken for a shared variable, so
// this must be the first thread_local of the file.
alignas(128) thread_local unsigned char end_of_variables;

std::mutex mutex;  // held during a launch: there is one at a time
std::deque<Record> records;

// Finds the shared variables, which are thread_local and so different in each host thread, and the kernel's library.
void find_memory() {
  run.shared.end = uintptr_t(&end_of_variables);  // this makes those of this host thread
  const auto look = [](dl_phdr_info* info, size_t, void*) {
    Memory image{UINTPTR_MAX, 0}, variables;
    for (int i = 0; i < info->dlpi_phnum; i++) {
      const auto& part = info->dlpi_phdr[i];
      const uintptr_t at = info->dlpi_addr + part.p_vaddr;
      if (part.p_type == PT_LOAD)
        image = {std::min(image.begin, at), std::max(image.end, at + uintptr_t(part.p_memsz))};
      if (part.p_type == PT_TLS) variables.begin = uintptr_t(info->dlpi_tls_data) + part.p_filesz;
    }
    if (image.holds(uintptr_t(run.launch->kernel), 1)) run.image = image;
    if (image.holds(uintptr_t(&run), 1)) run.shared.begin = variables.begin / 16 * 16;
    return 0;
  };
  dl_iterate_phdr(look, nullptr);
  if (const auto shared = uintptr_t(run.launch->shared)) {
    run.shared.begin = shared;
    run.shared.end = shared + run.launch->shared_bytes;
  }
  run.shared.kind = kShared;
  run.dirty = run.shared;
}

// Returns the lines that addr2line prints for an address of a loaded library.
std::vector<std::string> describe(const void* address, const char* option) {
  Dl_info info;
  if (!dladdr(address, &info)) return {};
  char command[4200];
  snprintf(command, sizeof command, "addr2line -Cs %s -e '%s' %#zx 2>/dev/null", option, info.dli_fname,
           size_t(address) - size_t(info.dli_fbase));
  std::vector<std::string> lines;
  FILE* const out = popen(command, "r");
  if (!out) return {};
  for (char line[2000]; fgets(line, sizeof line, out);) lines.emplace_back(line, strcspn(line, "\n"));
  pclose(out);
  return lines;
}

}  // namespace

void launch(const Launch& l) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (l.grid.count() >= UINT32_MAX / l.block.count())
    throw std::runtime_error("more threads than the emulator has numbers for");
  run = {};
  run.launch = &l;
  find_memory();
  grid_size = l.grid;
  run_blocks();
  Record record{grid_size, {}};
  for (const Touched& m : run.others)
    record.allocations.push_back({reinterpret_cast<const void*>(m.begin), m.loads, m.stores});
  records.push_back(record);
  if (records.size() > 1000) records.pop_front();
  std::string finding = written_guard();
  if (!run.finding.empty()) {
    finding = join(run.finding, "; block ", block_index, ", thread ", thread_index);
    if (run.where) {
      for (const auto& line : describe(static_cast<const char*>(run.where) - 1, "-i")) finding += ", " + line;
    }
  }
  if (finding.empty()) return;
  const auto name = describe(l.kernel, "-f");
  throw std::runtime_error(finding + "; " + (name.empty() ? "kernel" : name[0]));
}

void fail(const char* what) {
  if (in_kernel()) stop(__builtin_return_address(0), what);
  throw std::runtime_error(what);
}

std::vector<Record> last_launches() {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto all = std::exchange(records, {});
  return {all.begin(), all.end()};
}

}  // namespace emulator
