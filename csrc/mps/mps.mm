// The host side of the Metal back end: it makes pipelines and encodes calls into the command stream that PyTorch has
// open. Only PyTorch commits and waits. The kernels are in shaders/; plan.h decides how they are launched.
//
// PyTorch's graph capture does not record every message to an encoder. This file sends only messages that it records.
#include <ATen/mps/MPSDevice.h>
#include <ATen/mps/MPSProfiler.h>
#include <ATen/mps/MPSStream.h>
#include <ATen/ops/empty.h>

#include <chrono>
#include <exception>
#include <map>
#include <mutex>

#include "../ops.h"
#include "pipelines.h"
#include "plan.h"
#include "source.h"

namespace rope::mps {
namespace {

// At most, per threadgroup. In a gradient of a table the threads of a threadgroup share the work for a row, and in a
// norm over all heads that for a token.
constexpr NSUInteger kThreads = 128, kTableThreads = 256, kTokenThreads = 256;

id<MTLDevice> device() { return at::mps::MPSDevice::getInstance()->device(); }

const char* text_of(NSError* error) { return error ? [[error localizedDescription] UTF8String] : "no reason given"; }

// ---- pipelines: made once and never destroyed, because Metal may be gone when the process exits ----

// The libraries and pipelines that Metal has made in this process. The mutex guards all of it.
struct Made {
  std::mutex mutex;
  std::map<std::string_view, id<MTLLibrary>> libraries;  // by file
  struct Pipeline {
    id<MTLComputePipelineState> state;
    std::size_t info;  // its index in infos
  };
  std::map<std::pair<Kernel, Constants>, Pipeline> pipelines;
  std::vector<PipelineInfo> infos;
};
Made& made() {
  static auto& all = *new Made;
  return all;
}

// Returns make(), and notes under this name how long it took.
template <typename F>
auto timed(std::string name, F&& make) {
  const auto start = std::chrono::steady_clock::now();
  const auto result = make();
  const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
  made().infos.push_back({std::move(name), time.count(), 0});
  return result;
}

id<MTLLibrary> compiled_library(const Shader& shader) {
  if (shader.library_size == 0) return nil;
  dispatch_data_t data = dispatch_data_create(shader.library, shader.library_size, dispatch_get_main_queue(),
                                              ^{
                                              });  // the bytes live as long as the process
  NSError* error = nil;
  id<MTLLibrary> library = [device() newLibraryWithData:data error:&error];
  dispatch_release(data);
  if (!library)
    TORCH_WARN("torch_rope: Metal refuses the compiled library ", shader.file,
               ", so it compiles the source: ", text_of(error));
  return library;
}

id<MTLLibrary> library_from_source(const Shader& shader) {
  MTLCompileOptions* options = [MTLCompileOptions new];
  options.languageVersion = MTLLanguageVersion3_1;  // the first version with bfloat
  options.fastMathEnabled = NO;
#if __MAC_OS_X_VERSION_MAX_ALLOWED >= 150000  // macOS 15 replaces fastMathEnabled by mathMode
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wunguarded-availability-new"  // respondsToSelector checks it at run time
  if ([options respondsToSelector:@selector(setMathMode:)]) {
    options.mathMode = MTLMathModeSafe;
    options.mathFloatingPointFunctions = MTLMathFloatingPointFunctionsPrecise;
  }
#pragma clang diagnostic pop
#endif
  NSError* error = nil;
  id<MTLLibrary> library = [device() newLibraryWithSource:[NSString stringWithUTF8String:shader.source]
                                                  options:options
                                                    error:&error];
  [options release];
  TORCH_CHECK(library, "torch_rope: Metal does not compile the kernels of ", shader.file, ".metal: ", text_of(error));
  return library;
}

// Returns the library of a file. Each is made when the first of its kernels is used, so that a call does not wait for
// the compilation of kernels that it does not use.
id<MTLLibrary> library_of(std::string_view file) {
  id<MTLLibrary>& kept = made().libraries[file];
  if (kept) return kept;
  const Shader& shader =
      *std::find_if(kShaders, kShaders + kShaderCount, [&](const Shader& s) { return s.file == file; });
  kept = timed("library " + std::string(file), [&] {
    id<MTLLibrary> library = compiled_library(shader);
    return library ? library : library_from_source(shader);
  });
  return kept;
}

id<MTLComputePipelineState> new_pipeline(id<MTLLibrary> library, const std::string& name, const Constants& constants) {
  MTLFunctionConstantValues* values = [MTLFunctionConstantValues new];
  [values setConstantValues:&constants type:MTLDataTypeInt withRange:NSMakeRange(0, sizeof constants / sizeof(int))];
  NSError* error = nil;
  id<MTLFunction> function = [library newFunctionWithName:[NSString stringWithUTF8String:name.c_str()]
                                           constantValues:values
                                                    error:&error];
  [values release];
  TORCH_CHECK(function, "torch_rope: Metal cannot make the function ", name, ": ", text_of(error));
  id<MTLComputePipelineState> pipeline = [device() newComputePipelineStateWithFunction:function error:&error];
  [function release];
  TORCH_CHECK(pipeline, "torch_rope: Metal cannot make a pipeline for ", name, ": ", text_of(error));
  TORCH_CHECK([pipeline threadExecutionWidth] == kSimd, "torch_rope: a SIMD group of this GPU has ",
              [pipeline threadExecutionWidth], " threads but must have ", int(kSimd));
  return pipeline;
}

// Returns the pipeline that is compiled for these function constants. Call it before entering the queue: compiling
// takes long, and no other thread should wait for the queue meanwhile.
id<MTLComputePipelineState> pipeline(const Kernel& kernel, const Constants& constants) {
  const std::lock_guard<std::mutex> lock(made().mutex);
  Made::Pipeline& kept = made().pipelines[{kernel, constants}];
  if (!kept.state) {
    @autoreleasepool {
      id<MTLLibrary> library = library_of(kernel.file);
      const std::string name = kernel.name();
      kept.state = timed(name, [&] { return new_pipeline(library, name, constants); });
      kept.info = made().infos.size() - 1;
    }
  }
  made().infos[kept.info].calls++;
  return kept.state;
}

// Returns how many threads a threadgroup of this pipeline has: whole SIMD groups, and at most `most` threads.
NSUInteger threads_of(id<MTLComputePipelineState> pipeline, NSUInteger most) {
  return std::min(most, [pipeline maxTotalThreadsPerThreadgroup] / kSimd * kSimd);
}

// ---- encoding ----

// A small buffer, which is bound for a tensor without elements: Metal's validation does not accept nil.
const Tensor& nothing() {
  static const Tensor& tensor = *new Tensor(at::empty({16}, at::device(at::kMPS).dtype(at::kByte)));
  return tensor;
}

// torch.mps.profiler. Newer releases of torch have functions that take the stream, and these must be preferred: the
// compiler takes the first overload if it exists, because 0 is an int.
template <typename Profiler>
auto begin_profile(Profiler& profiler, const void* pipeline, const std::string& name, at::mps::MPSStream* stream, int)
    -> decltype(void(profiler.beginProfileKernel(pipeline, name, false, stream))) {
  profiler.beginProfileKernel(pipeline, name, false, stream);
}
template <typename Profiler>
void begin_profile(Profiler& profiler, const void* pipeline, const std::string& name, at::mps::MPSStream*, long) {
  profiler.beginProfileKernel(pipeline, name, false);
}
template <typename Profiler>
auto end_profile(Profiler& profiler, const void* pipeline, at::mps::MPSStream* stream, int)
    -> decltype(void(profiler.endProfileKernel(pipeline, stream))) {
  profiler.endProfileKernel(pipeline, stream);
}
template <typename Profiler>
void end_profile(Profiler& profiler, const void* pipeline, at::mps::MPSStream*, long) {
  profiler.endProfileKernel(pipeline);
}

// Calls body(encoder) in the queue of PyTorch's stream, which owns the encoder. The body must not call ATen, which
// would wait for the same queue. No exception may leave the block, so this function rethrows it outside. torch's
// profiler sees the call under the name of its first kernel; the profiler ends the encoder, so it comes last.
template <typename F>
void encode(const Kernel& kernel, id<MTLComputePipelineState> pipeline, F&& body) {
  nothing();  // allocates outside of the queue, because the allocation calls ATen
  at::mps::MPSStream* stream = at::mps::getCurrentMPSStream();
  __block std::exception_ptr error;
  __block bool failed = false;
  dispatch_sync(stream->queue(), ^{
    try {
      @autoreleasepool {
        auto& profiler = at::mps::getMPSProfiler();
        const bool profiled = profiler.isOperationProfilingEnabled();
        if (profiled) begin_profile(profiler, pipeline, kernel.name(), stream, 0);
        body(stream->commandEncoder());
        if (profiled) end_profile(profiler, pipeline, stream, 0);
      }
    } catch (...) {
      failed = true;
      error = std::current_exception();
    }
  });
  if (error) std::rethrow_exception(error);
  // An exception of Objective-C is caught too, but leaves no exception_ptr.
  TORCH_CHECK(!failed, "torch_rope: Metal raised an exception while ", kernel.name(), " was encoded");
}

// Binds a tensor. If the call lacks it, the function constants leave out the kernel's argument, and nothing is bound.
void set(id<MTLComputeCommandEncoder> encoder, int index, const Tensor* t) {
  if (!t || !t->defined()) return;
  if (t->numel() == 0) t = &nothing();
  [encoder setBuffer:__builtin_bit_cast(id<MTLBuffer>, t->storage().data())
              offset:NSUInteger(t->storage_offset()) * t->element_size()
             atIndex:NSUInteger(index)];
}
void set(id<MTLComputeCommandEncoder> encoder, int index, const OptTensor& t) {
  if (t) set(encoder, index, &*t);
}

template <typename Params>
void set_params(id<MTLComputeCommandEncoder> encoder, const Params& params) {
  static_assert(sizeof(Params) <= 4096, "setBytes takes at most 4096 bytes");
  [encoder setBytes:&params length:sizeof params atIndex:kBufferParams];
}

void set_tensors(id<MTLComputeCommandEncoder> encoder, const RotateCall& call, const Constants& c) {
  if (!c.q_in_place) set(encoder, kBufferQIn, call.q);
  set(encoder, kBufferQOut, call.q_out);
  if (!c.k_in_place) set(encoder, kBufferKIn, call.k);
  set(encoder, kBufferKOut, call.k_out);
  set(encoder, kBufferVIn, call.v);
  set(encoder, kBufferVOut, call.v_out);
  set(encoder, kBufferCos, call.cos);
  if (c.table_access != kComplex) set(encoder, kBufferSin, call.sin);
  set(encoder, kBufferInvFreq, call.inv_freq);
  set(encoder, kBufferPositions, call.positions);
  set(encoder, kBufferSlots, call.slots);
  set(encoder, kBufferQWeight, call.q_norm_weight);
  set(encoder, kBufferKWeight, call.k_norm_weight);
  set(encoder, kBufferKScale, call.k_scale);
  set(encoder, kBufferVScale, call.v_scale);
}

MTLSize size_of(const Size3& s) { return MTLSizeMake(NSUInteger(s.x), NSUInteger(s.y), NSUInteger(s.z)); }

// Returns false if the call has nothing to do. Checks the range of the positions if it follows from the arguments
// alone. The kernel checks positions in a tensor, and positions that are errors only if a slot is not negative.
bool ready(const RotateCall& call) {
  const Tensor& q = *call.q;
  if (q.size(-3) == 0 || (q.dim() == 4 && q.size(0) == 0)) return false;
  if (!call.positions && !call.slots) check_position_range(call, call.params(), 0, q.size(-3) - 1);
  return q.numel() || (call.k && call.k->numel()) || (call.v && call.v->numel());
}

struct Mps : AnyBackend {
  static void rotate(const RotateCall& call) {
    if (!ready(call)) return;
    const Plan p = plan(call);
    if (p.rotate.chunks == 0) return;
    id<MTLComputePipelineState> kernel = pipeline(p.kernel, p.constants);
    const rope_int all = p.grid.x * p.grid.y * p.grid.z * std::max(p.constants.lanes, 1);
    const auto most = rope_int(threads_of(kernel, p.over_heads ? kTokenThreads : kThreads));
    const auto threads = NSUInteger(p.over_heads ? token_threads(p, most) : group_threads(all, most));
    encode(p.kernel, kernel, [&](id<MTLComputeCommandEncoder> encoder) {
      [encoder setComputePipelineState:kernel];
      set_params(encoder, p.rotate);
      set_tensors(encoder, call, p.constants);
      if (p.over_heads) {
        [encoder setThreadgroupMemoryLength:kSimd * sizeof(float) atIndex:0];  // the parts of a sum
        [encoder dispatchThreadgroups:size_of(p.grid) threadsPerThreadgroup:MTLSizeMake(threads, 1, 1)];
      } else if (p.constants.lanes) {
        const rope_int teams = rope_int(threads) / p.constants.lanes;
        [encoder dispatchThreadgroups:MTLSizeMake(NSUInteger(ceil_div(p.grid.x, teams)), 1, 1)
                threadsPerThreadgroup:MTLSizeMake(threads, 1, 1)];
      } else {
        [encoder dispatchThreads:size_of(p.grid) threadsPerThreadgroup:size_of(group_of(p.grid, rope_int(threads)))];
      }
    });
  }

  static void norm_backward(const NormBackwardCall& call) {
    const RotateCall& gradients = call.rotate;
    if (!ready(gradients)) {
      call.q_norm_weight_grad.zero_();
      call.k_norm_weight_grad.zero_();
      return;
    }
    const Plan p = plan(gradients, {&call.q, &call.k});
    id<MTLComputePipelineState> kernel = pipeline(p.kernel, p.constants);
    const NSUInteger threads =
        p.wide_head ? NSUInteger(kSimd) : threads_of(kernel, p.over_heads ? kTokenThreads : kThreads);
    const Parts parts = parts_of(p, rope_int(threads) / p.constants.lanes);
    const RopeParams& r = p.rotate.params;
    const rope_int q_channels = p.over_heads ? r.q.heads * r.head_dim : r.head_dim,
                   k_channels = p.over_heads ? r.k.heads * r.head_dim : r.head_dim;
    NormBackward n{p.rotate, {}, {}, parts.q_items, parts.k_items, unsigned(parts.part_items)};
    strides_of(call.q, n.q);
    strides_of(call.k, n.k);
    const Tensor sums = at::empty({parts.count, q_channels + k_channels}, call.q.options().dtype(at::kFloat));
    Constants weights{};
    weights.native_q_weight = p.constants.native_q_weight;
    weights.native_k_weight = p.constants.native_k_weight;
    id<MTLComputePipelineState> sum =
        pipeline({"norm_backward", "sum_parts", type_of(gradients.op, "q", call.q), ""}, weights);
    const SumParts s{unsigned(parts.count), unsigned(q_channels), unsigned(k_channels)};
    encode(p.kernel, kernel, [&](id<MTLComputeCommandEncoder> encoder) {
      [encoder setComputePipelineState:kernel];
      set_params(encoder, n);
      set_tensors(encoder, gradients, p.constants);
      set(encoder, kBufferQBefore, &call.q);
      set(encoder, kBufferKBefore, &call.k);
      set(encoder, kBufferSums, &sums);
      // For each thread a sum for each of the up to 8 channels of its chunk, or two factors for each of kSimd tokens.
      if (!p.wide_head)
        [encoder setThreadgroupMemoryLength:(p.over_heads ? kSimd * 2 : threads * 8) * sizeof(float) atIndex:0];
      [encoder dispatchThreadgroups:MTLSizeMake(NSUInteger(parts.count), 2, 1)
              threadsPerThreadgroup:MTLSizeMake(threads, 1, 1)];
      [encoder setComputePipelineState:sum];
      set_params(encoder, s);
      set(encoder, 1, &sums);
      set(encoder, 2, &call.q_norm_weight_grad);
      set(encoder, 3, &call.k_norm_weight_grad);
      const Size3 grid{std::max(q_channels, k_channels), 2, 1};
      [encoder dispatchThreads:size_of(grid)
          threadsPerThreadgroup:size_of(group_of(grid, rope_int(threads_of(sum, kThreads))))];
    });
  }

  static void table_backward(const TableBackwardCall& call) {
    if (!ready(call.rotate)) {
      call.cos_grad.zero_();
      call.sin_grad.zero_();
      return;
    }
    if (call.cos_grad.numel() == 0) return;
    const Plan p = plan(call);
    id<MTLComputePipelineState> kernel = pipeline(p.kernel, p.constants);
    const NSUInteger threads = threads_of(kernel, kTableThreads);
    TableBackward n{p.rotate, {}, {}, call.tokens()};
    const Size3 grid = grid_of(p, n.tokens, rope_int(threads));
    TORCH_CHECK_NOT_IMPLEMENTED(grid.z <= UINT32_MAX, call.rotate.op, ": cos has ", grid.z,
                                " rows but must have at most ", UINT32_MAX, "; the tables are too large for Metal");
    strides_of(call.q, n.q);
    if (call.k) strides_of(*call.k, n.k);
    Tensor order, starts;
    if (n.tokens.listed) std::tie(order, starts) = call.order_and_starts();
    encode(p.kernel, kernel, [&](id<MTLComputeCommandEncoder> encoder) {
      [encoder setComputePipelineState:kernel];
      set_params(encoder, n);
      set(encoder, kTableQGiven, call.rotate.q);
      set(encoder, kTableKGiven, call.rotate.k);
      set(encoder, kTableQ, &call.q);
      set(encoder, kTableK, call.k);
      set(encoder, kTableOrder, &order);
      set(encoder, kTableStarts, &starts);
      set(encoder, kTableCosGrad, &call.cos_grad);
      set(encoder, kTableSinGrad, &call.sin_grad);
      // For each thread a sum for cos and one for sin of each of its pairs, which are 4 or 1.
      [encoder setThreadgroupMemoryLength:threads * (p.constants.vectors ? 8 : 2) * sizeof(float) atIndex:0];
      [encoder dispatchThreads:size_of(grid) threadsPerThreadgroup:size_of(group_of(grid, rope_int(threads)))];
    });
  }

  static void cos_sin(const CosSinCall& call) {
    // [axes, tokens]. This copies only if no single stride reaches all tokens of an axis.
    const Tensor positions = call.positions.unsqueeze(-1).flatten(1);
    const CosSinParams c = call.params(positions, call.inv_freq);
    const Size3 grid{c.pairs, c.tokens, 1};
    if (grid.x == 0 || grid.y == 0) return;
    TORCH_CHECK_NOT_IMPLEMENTED(std::max(grid.x, grid.y) <= UINT32_MAX, "rope.cos_sin: the result has shape [", grid.y,
                                ", ", grid.x, "] but must have at most ", UINT32_MAX,
                                " positions and as many pairs; the tables are too large for Metal");
    TORCH_CHECK_NOT_IMPLEMENTED(positions.scalar_type() != at::kDouble,
                                "rope.cos_sin: positions is float64 but must be float32 or an integer type, because ",
                                "Metal has no float64");
    TORCH_CHECK_NOT_IMPLEMENTED(call.inv_freq.scalar_type() != at::kDouble, "rope.cos_sin: inv_freq is ", kNoFloat64);
    Constants constants{};
    constants.scaled = is_scaled(c);
    constants.position_type = int(c.position_type);
    constants.split_inv_freq = c.split_inv_freq;
    const Kernel name{"cos_sin", "cos_sin", type_of("rope.cos_sin", "dtype", call.cos), ""};
    id<MTLComputePipelineState> kernel = pipeline(name, constants);
    encode(name, kernel, [&](id<MTLComputeCommandEncoder> encoder) {
      [encoder setComputePipelineState:kernel];
      set_params(encoder, c);
      set(encoder, 1, &positions);
      set(encoder, 2, &call.inv_freq);
      set(encoder, 3, &call.cos);
      set(encoder, 4, &call.sin);
      [encoder dispatchThreads:size_of(grid)
          threadsPerThreadgroup:size_of(group_of(grid, rope_int(threads_of(kernel, kThreads))))];
    });
  }
};

}  // namespace

std::vector<PipelineInfo> pipelines() {
  const std::lock_guard<std::mutex> lock(made().mutex);
  return made().infos;
}

TORCH_LIBRARY_IMPL(ROPE_NAMESPACE, MPS, m) { register_ops<Mps>(m); }

}  // namespace rope::mps
