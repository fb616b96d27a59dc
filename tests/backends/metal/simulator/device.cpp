// Gives torch a device "mps" on a machine that has none. As on macOS, the data pointer of a storage is a buffer object,
// not the address of memory. Operators of aten that this file does not register run on the CPU.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/MPSHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <sstream>

#include "csrc/mps/pipelines.h"
#include "dispatch.h"

namespace {

const c10::Device kMps(c10::kMPS, 0);

struct BufferAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* const buffer = bytes ? simulated_buffer(bytes) : nullptr;
    return {buffer, buffer, &simulated_release, kMps};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &simulated_release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    simulated_synchronize();
    memcpy(simulated_contents(to), simulated_contents(from), bytes);
  }
};
BufferAllocator& allocator() {
  static auto* const made = new BufferAllocator;  // never destroyed, because tensors may be freed late
  return *made;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kMPS; }
  c10::Device exchangeDevice(c10::Device) const override { return kMps; }
  c10::Device getDevice() const override { return kMps; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, kMps); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};
C10_REGISTER_GUARD_IMPL(MPS, Guard);

at::ScalarType checked(std::optional<at::ScalarType> dtype) {
  TORCH_CHECK_TYPE(dtype != at::kDouble,
                   "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. Please "
                   "use float32 instead.");
  return dtype.value_or(at::kFloat);
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DispatchKeySet keys(c10::DispatchKey::MPS);
  return at::detail::empty_generic(size, &allocator(), keys, checked(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  const c10::DispatchKeySet keys(c10::DispatchKey::MPS);
  return at::detail::empty_strided_generic(size, stride, &allocator(), keys, checked(dtype));
}

// Returns a CPU tensor in the memory of t.
at::Tensor on_host(const at::Tensor& t) {
  if (t.is_cpu()) return t;
  simulated_synchronize();
  auto* data = static_cast<char*>(simulated_contents(t.storage().data()));
  if (data) data += t.storage_offset() * int64_t(t.element_size());
  const auto keep = [storage = t.storage()](void*) {};
  const at::Tensor host = at::from_blob(data, t.sizes(), t.strides(), keep, t.options().device(at::kCPU));
  host._set_neg(t.is_neg());
  host._set_conj(t.is_conj());
  return host;
}

at::Tensor& copy_(at::Tensor& to, const at::Tensor& from, bool) {
  on_host(to).copy_(on_host(from));
  return to;
}
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  on_host(to).copy_(on_host(from));
  return to;
}
at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}
at::Tensor& fill_(at::Tensor& t, const at::Scalar& value) {
  on_host(t).fill_(value);
  return t;
}
at::Tensor& zero_(at::Tensor& t) {
  on_host(t).zero_();
  return t;
}
at::Scalar item(const at::Tensor& t) { return on_host(t).item(); }

const at::Tensor& resize_(const at::Tensor& t, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  if (t.sizes() == size) return t;  // with its strides
  const c10::Storage& storage = t.storage();
  const size_t bytes = size_t(c10::multiply_integers(size) + t.storage_offset()) * t.element_size();
  if (storage.nbytes() < bytes) {
    c10::DataPtr data = allocator().allocate(bytes);
    if (storage.nbytes()) allocator().copy_data(data.get(), storage.data(), storage.nbytes());
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
  t.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return t;
}

at::Tensor& set_(at::Tensor& t, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  t.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  t.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return t;
}

at::Tensor& set_whole(at::Tensor& t, at::Storage storage) {
  const int64_t size[] = {int64_t(storage.nbytes() / t.element_size())}, stride[] = {1};
  return set_(t, std::move(storage), 0, size, stride);
}

// Returns what torch_rope._C.metal_pipelines() returns on macOS, as a literal of Python.
std::string pipelines() {
  std::ostringstream out;
  for (const auto& p : rope::mps::pipelines())
    out << "('" << p.kernel << "', " << p.milliseconds << ", " << p.calls << "), ";
  return "[" + out.str() + "]";
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  TORCH_CHECK_NOT_IMPLEMENTED(op.schema().name().rfind("aten::", 0) == 0, "The operator '", op.operator_name(),
                              "' is not currently implemented for the MPS device.");
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, MPS, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, MPS, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("set_.source_Storage", &set_whole);
  m.impl("set_.source_Storage_storage_offset", &set_);
  m.impl("resize_", &resize_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("copy_", &copy_);
  m.impl("fill_.Scalar", &fill_);
  m.impl("zero_", &zero_);
  m.impl("_local_scalar_dense", &item);
}

// The functions of simulator.py. Those without a comment set what emulator.h describes.
TORCH_LIBRARY(simulator, m) {
  m.def("synchronize() -> ()", [] { simulated_synchronize(); });
  m.def("last_dispatches() -> str", &simulator::last_dispatches);
  m.def("thread_order(int order) -> ()", [](int64_t order) { emulator::options.order = emulator::Order(order); });
  m.def("count_lines(bool count) -> ()", [](bool count) { emulator::options.lines = count; });
  m.def("allow_foreign(bool allow) -> ()", [](bool allow) { emulator::options.foreign = allow; });
  m.def("pipelines() -> str", &pipelines);
  // Returns how many libraries this process has asked Metal to compile.
  m.def("compilations() -> int", [] { return int64_t(simulator::compilations); });
  // Starts or stops torch's profiler. Returns the names of the kernels that it saw since the call before.
  m.def("profile(bool on) -> str", &simulated_profile);
  // Limits maxTotalThreadsPerThreadgroup of every pipeline.
  m.def("max_threads(int threads) -> ()", [](int64_t threads) { simulator::max_threads = size_t(threads); });
}

[[maybe_unused]] const bool set = (c10::SetAllocator(c10::kMPS, &allocator()), true);

}  // namespace

namespace at {

// torch looks for the hooks by this name.
struct MPSHooks final : MPSHooksInterface {
  template <typename... Args>
  explicit MPSHooks(Args...) {}  // torch before 2.12 passes an argument
  void init() const override {}
  bool hasMPS() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  Allocator* getMPSDeviceAllocator() const override { return &allocator(); }
  void deviceSynchronize() const override { simulated_synchronize(); }
};
REGISTER_MPS_HOOKS(MPSHooks);

}  // namespace at
