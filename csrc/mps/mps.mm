// The host side of the Metal back end: it makes pipelines and encodes calls into the command stream that PyTorch has
// open. Only PyTorch commits and waits. The kernels are in shaders/; dispatch.h decides how they are launched.
//
// PyTorch's graph capture does not record every message to an encoder. This file sends only messages that it records,
// and a barrier, which PyTorch's encoder does not need, because it runs one dispatch after the other.
#include <ATen/mps/MPSDevice.h>
#include <ATen/mps/MPSProfiler.h>
#include <ATen/mps/MPSStream.h>
#include <ATen/ops/empty.h>

#include <chrono>
#include <exception>
#include <map>
#include <mutex>

#include "../backend.h"
#include "dispatch.h"
#include "pipelines.h"

namespace rope::mps {
namespace {

id<MTLDevice> device() { return at::mps::MPSDevice::getInstance()->device(); }

const char* text_of(NSError* error) { return error ? [[error localizedDescription] UTF8String] : "no reason given"; }

// ---- pipelines: made once and never destroyed, because Metal may be gone when the process exits ----

// The libraries and pipelines that Metal has made in this process. The mutex guards all of it.
struct Made {
  std::mutex mutex;
  std::map<Kernel, id<MTLLibrary>> libraries;
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

id<MTLLibrary> new_library(const Kernel& kernel) {
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
  id<MTLLibrary> library = [device() newLibraryWithSource:[NSString stringWithUTF8String:kernel.source().c_str()]
                                                  options:options
                                                    error:&error];
  [options release];
  TORCH_CHECK(library, "torch_rope: Metal does not compile the kernel ", kernel.name(), ": ", text_of(error));
  return library;
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
      const std::string name = kernel.name();
      id<MTLLibrary>& library = made().libraries[kernel];
      if (!library) library = timed("library " + name, [&] { return new_library(kernel); });
      kept.state = timed(name, [&] { return new_pipeline(library, name, constants); });
      kept.info = made().infos.size() - 1;
    }
  }
  made().infos[kept.info].calls++;
  return kept.state;
}

// ---- encoding ----

// A small buffer, which is bound for a tensor without elements: Metal's validation does not accept nil.
const Tensor& nothing() {
  static const Tensor& tensor = *new Tensor(at::empty({16}, at::device(at::kMPS).dtype(at::kByte)));
  return tensor;
}

// One launch of a kernel, as data.
struct Launch {
  Kernel kernel;
  id<MTLComputePipelineState> pipeline;
  c10::SmallVector<BoundTensor, 24> tensors;
  rope_int most;  // threads of a threadgroup, in whole SIMD groups
  Grid grid{};
  NSUInteger memory = 0;  // bytes of threadgroup memory
  const void* params;
  NSUInteger params_size;

  // Keeps the address of the parameters, at most 4096 bytes.
  template <typename Params>
  Launch(const Kernel& kernel, const Constants& constants, c10::ArrayRef<BoundTensor> tensors, const Params& params)
      : kernel(kernel),
        pipeline(mps::pipeline(kernel, constants)),
        tensors(tensors.begin(), tensors.end()),
        most(std::max<rope_int>(kSimd, [pipeline maxTotalThreadsPerThreadgroup] / kSimd * kSimd)),
        params(&params),
        params_size(sizeof params) {}
};

MTLSize size_of(const Size3& s) { return MTLSizeMake(NSUInteger(s.x), NSUInteger(s.y), NSUInteger(s.z)); }

void encode(const Launch& launch, id<MTLComputeCommandEncoder> encoder) {
  [encoder setComputePipelineState:launch.pipeline];
  [encoder setBytes:launch.params length:launch.params_size atIndex:kBufferParams];
  for (const auto& [buffer, given] : launch.tensors) {
    const Tensor& t = given->numel() ? *given : nothing();
    [encoder setBuffer:__builtin_bit_cast(id<MTLBuffer>, t.storage().data())
                offset:NSUInteger(t.storage_offset()) * t.element_size()
               atIndex:NSUInteger(buffer)];
  }
  if (launch.memory) [encoder setThreadgroupMemoryLength:launch.memory atIndex:0];
  const MTLSize size = size_of(launch.grid.size), threads = size_of(launch.grid.threads);
  if (launch.grid.of_threadgroups) {
    [encoder dispatchThreadgroups:size threadsPerThreadgroup:threads];
  } else {
    [encoder dispatchThreads:size threadsPerThreadgroup:threads];
  }
}

// torch.mps.profiler. Newer releases of torch have functions that take the stream, and these must be preferred: the
// compiler takes the first overload if it exists, because 0 is an int.
template <typename Profiler>
auto profile(Profiler& profiler, bool begins, const Launch& launch, at::mps::MPSStream* stream, int)
    -> decltype(void(profiler.endProfileKernel(launch.pipeline, stream))) {
  begins ? void(profiler.beginProfileKernel(launch.pipeline, launch.kernel.name(), false, stream))
         : void(profiler.endProfileKernel(launch.pipeline, stream));
}
template <typename Profiler>
void profile(Profiler& profiler, bool begins, const Launch& launch, at::mps::MPSStream*, long) {
  begins ? void(profiler.beginProfileKernel(launch.pipeline, launch.kernel.name(), false))
         : void(profiler.endProfileKernel(launch.pipeline));
}

// Encodes launches, each of which may read what those before it wrote, in the queue of PyTorch's stream, which owns the
// encoder. Nothing there may call ATen, which would wait for the same queue. No exception may leave the block, so this
// function rethrows it outside. torch's profiler sees the call under the name of its first kernel; the profiler ends
// the encoder, so it comes last.
void encode(std::initializer_list<const Launch*> launches) {
  nothing();  // allocates outside of the queue, because the allocation calls ATen
  const Launch& first = **launches.begin();
  at::mps::MPSStream* stream = at::mps::getCurrentMPSStream();
  __block std::exception_ptr error;
  __block bool failed = false;
  dispatch_sync(stream->queue(), ^{
    try {
      @autoreleasepool {
        auto& profiler = at::mps::getMPSProfiler();
        const bool profiled = profiler.isOperationProfilingEnabled();
        if (profiled) profile(profiler, true, first, stream, 0);
        for (const Launch* launch : launches) {
          id<MTLComputeCommandEncoder> encoder = stream->commandEncoder();
          if (launch != &first) [encoder memoryBarrierWithScope:MTLBarrierScopeBuffers];
          encode(*launch, encoder);
        }
        if (profiled) profile(profiler, false, first, stream, 0);
      }
    } catch (...) {
      failed = true;
      error = std::current_exception();
    }
  });
  if (error) std::rethrow_exception(error);
  // An exception of Objective-C is caught too, but leaves no exception_ptr.
  TORCH_CHECK(!failed, "torch_rope: Metal raised an exception while ", first.kernel.name(), " was encoded");
}

struct Mps : AnyBackend {
  static void check(const Call& call, const Args& a) {
    if (!is_empty(a)) check_types(call);
  }

  static void rotate(const Call& call, Args& a) {
    simplify(a);
    const Dispatch d = dispatch_of(call, a);
    if (d.params.chunks == 0) return;
    Launch launch(d.kernel, d.constants, d.tensors, d.params);
    launch.grid = grid_of(d, launch.most);
    if (d.wide) launch.memory = kSimd * sizeof(float);  // the parts of a sum
    encode({&launch});
  }

  static void norm_backward(const Call& call, Args& a) {
    merge_batch(a);
    Dispatch d = dispatch_of(call, a);
    const TiledParams& r = d.params;
    Launch parts(d.kernel, d.constants, d.tensors, r);
    const rope_int threads = cut_into_parts(d, parts.most), channels = rope_int(r.channels[kQ]) + r.channels[kK];
    const Tensor sums = at::empty({r.parts, channels}, call.q().options().dtype(at::kFloat));
    parts.tensors.push_back({kBufferSums, &sums});
    parts.grid = {{r.parts, 2, 1}, {threads, 1, 1}, true};
    // For each thread a sum for each of the up to 8 channels of its chunk, or two factors for each of kSimd groups.
    parts.memory = (d.wide ? kSimd * 2 : NSUInteger(threads) * 8) * sizeof(float);

    Constants weights{};
    weights.native_weights = d.constants.native_weights;
    Launch total({"norm_backward", "sum_parts", d.kernel.type}, weights,
                 {{1, &sums}, {2, call.sides[kQ].weight_grad}, {3, call.sides[kK].weight_grad}}, r);
    total.grid = grid_of({std::max(r.channels[kQ], r.channels[kK]), 2, 1}, std::min<rope_int>(total.most, kThreads));
    encode({&parts, &total});
  }

  static void cos_sin(const Call& given) {
    // [axes, tokens]. This copies only if no single stride reaches all tokens of an axis.
    const Tensor positions = given.positions->unsqueeze(-1).flatten(1);
    Call call = given;
    call.positions = &positions;
    const CosSinArgs c = call.cos_sin_args();
    TORCH_CHECK_NOT_IMPLEMENTED(std::max(c.pairs, c.tokens) <= UINT32_MAX, "rope.cos_sin: the result has shape [",
                                c.tokens, ", ", c.pairs, "] but must have at most ", UINT32_MAX,
                                " positions and as many pairs; the tables are too large for Metal");
    TORCH_CHECK_NOT_IMPLEMENTED(positions.scalar_type() != at::kDouble,
                                "rope.cos_sin: positions is float64 but must be float32 or an integer type, because ",
                                "Metal has no float64");
    TORCH_CHECK_NOT_IMPLEMENTED(call.inv_freq->scalar_type() != at::kDouble, "rope.cos_sin: inv_freq is ", kNoFloat64);
    Constants constants{};
    constants.scaled = is_scaled(c);
    constants.position_dtype = int(c.position_dtype);
    constants.split_inv_freq = c.split_inv_freq;
    Launch launch({"cos_sin", "cos_sin", type_of("rope.cos_sin", "dtype", *call.cos)}, constants,
                  {{1, &positions}, {2, call.inv_freq}, {3, call.cos}, {4, call.sin}}, c);
    launch.grid = grid_of({c.pairs, c.tokens, 1}, std::min<rope_int>(launch.most, kThreads));
    encode({&launch});
  }
};

}  // namespace

std::vector<PipelineInfo> pipelines() {
  const std::lock_guard<std::mutex> lock(made().mutex);
  return made().infos;
}

TORCH_LIBRARY_IMPL(ROPE_NAMESPACE, MPS, m) { register_backend<Mps>(m); }

}  // namespace rope::mps
