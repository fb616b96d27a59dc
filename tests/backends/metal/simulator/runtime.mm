// Stands in for what csrc/mps uses of macOS: Foundation, libdispatch, Metal, and the part of torch that is built only
// there.
#include <ATen/mps/MPSDevice.h>
#include <ATen/mps/MPSProfiler.h>
#include <ATen/mps/MPSStream.h>
#include <objc/runtime.h>

#include <cstring>
#include <mutex>
#include <thread>

#include "dispatch.h"

using simulator::fail;

// Lets C++ exceptions pass through Objective-C++ code as through C++ code. The GNU runtime's own function does not know
// the types of C++ exceptions.
extern "C" int __gxx_personality_v0(int, int, unsigned long, void*, void*);
extern "C" int __gnu_objc_personality_v0(int version, int actions, unsigned long kind, void* exception, void* context) {
  return __gxx_personality_v0(version, actions, kind, exception, context);
}

// ---- Foundation ----

// Nothing is retained here, so every object has one owner. A pool does nothing, which leaks a few strings.
@implementation NSObject
+ (id)alloc {
  return class_createInstance(self, 0);
}
+ (id)new {
  return [[self alloc] init];
}
- (id)init {
  return self;
}
- (oneway void)release {
  [self dealloc];
}
- (void)dealloc {
  object_dispose(self);
}
- (BOOL)respondsToSelector:(SEL)selector {
  return class_respondsToSelector(object_getClass(self), selector);
}
@end

@implementation NSAutoreleasePool
- (void)drain {
  [self release];
}
@end

@implementation NSString
+ (NSString*)stringWithUTF8String:(const char*)text {
  if (!text) fail("stringWithUTF8String got NULL");
  NSString* const made = [self new];
  made->bytes_ = strdup(text);
  return made;
}
- (const char*)UTF8String {
  return bytes_;
}
@end

@implementation NSError
- (NSString*)localizedDescription {
  return text_;
}
@end

// ---- libdispatch: serial queues ----

struct simulated_queue {
  std::mutex mutex;
  std::thread::id owner;
  bool is_mine() const { return owner == std::this_thread::get_id(); }
};

namespace {
simulated_queue stream_queue;

void check_on_queue(const char* what) {
  if (!stream_queue.is_mine()) fail(std::string(what) + " is used outside of the stream's queue");
}
}  // namespace

void dispatch_sync(dispatch_queue_t queue, dispatch_block_t block) {
  if (!queue) fail("dispatch_sync got no queue");
  if (queue->is_mine())
    fail("dispatch_sync on the queue that runs this block is a deadlock. A call of ATen in the block does that too");
  const std::lock_guard<std::mutex> lock(queue->mutex);
  queue->owner = std::this_thread::get_id();
  try {
    block();
    queue->owner = {};
  } catch (const std::exception& error) {
    queue->owner = {};
    fail(std::string("an exception left a block of dispatch_sync, which ends the process on macOS: ") + error.what());
  }
}

// ---- Metal: a library is the compiled source, a pipeline the kernel and its function constants ----

@interface SimulatedBuffer : NSObject <MTLBuffer> {
 @public
  std::shared_ptr<simulator::Buffer>* memory_;
}
@end
@implementation SimulatedBuffer
- (void*)contents {
  return (*memory_)->data;
}
- (void)dealloc {
  delete memory_;
  [super dealloc];
}
@end

@implementation MTLCompileOptions
- (id)init {
  fast_ = YES;
  math_ = MTLMathModeFast;
  functions_ = MTLMathFloatingPointFunctionsFast;
  return self;
}
@synthesize fastMathEnabled = fast_, mathMode = math_, mathFloatingPointFunctions = functions_,
            languageVersion = version_;
@end

@implementation MTLFunctionConstantValues
- (id)init {
  values_ = new simulator::Values;
  return self;
}
- (void)setConstantValues:(const void*)values type:(MTLDataType)type withRange:(NSRange)range {
  if (type != MTLDataTypeInt) fail("a function constant must be an int in the simulator");
  for (NSUInteger i = 0; i < range.length; i++)
    (*static_cast<simulator::Values*>(values_))[range.location + i] = static_cast<const int*>(values)[i];
}
@end

@interface SimulatedPipeline : NSObject <MTLFunction, MTLComputePipelineState> {
 @public
  simulator::Pipeline* pipeline_;
}
@end
@implementation SimulatedPipeline
- (NSUInteger)maxTotalThreadsPerThreadgroup {
  return simulator::most_threads(*pipeline_);
}
- (NSUInteger)threadExecutionWidth {
  return 32;
}
- (oneway void)release {
  // A function is its pipeline, which csrc/mps keeps.
}
@end

namespace {
// Returns what make() returns. If it throws, makes *error with the message and returns nil.
template <typename F>
id made_by(NSError** error, F make) {
  try {
    return make();
  } catch (const std::exception& e) {
    *error = [NSError new];
    (*error)->text_ = [NSString stringWithUTF8String:e.what()];
    return nil;
  }
}
}  // namespace

@interface SimulatedLibrary : NSObject <MTLLibrary> {
 @public
  const simulator::Library* library_;
}
@end
@implementation SimulatedLibrary
- (id<MTLFunction>)newFunctionWithName:(NSString*)name
                        constantValues:(MTLFunctionConstantValues*)values
                                 error:(NSError**)error {
  return made_by(error, [&] {
    const auto& constants = *static_cast<simulator::Values*>(values->values_);
    SimulatedPipeline* const function = [SimulatedPipeline new];
    function->pipeline_ = new simulator::Pipeline(simulator::pipeline(*library_, [name UTF8String], constants));
    return function;
  });
}
@end

@interface SimulatedDevice : NSObject <MTLDevice>
@end
@implementation SimulatedDevice
- (id<MTLLibrary>)newLibraryWithSource:(NSString*)source options:(MTLCompileOptions*)options error:(NSError**)error {
  return made_by(error, [&] {
    if (options->fast_ || options->math_ != MTLMathModeSafe ||
        options->functions_ != MTLMathFloatingPointFunctionsPrecise)
      fail("the shaders must be compiled with safe math and precise functions");
    SimulatedLibrary* const library = [SimulatedLibrary new];
    library->library_ = simulator::compile([source UTF8String]);
    return library;
  });
}
- (id<MTLComputePipelineState>)newComputePipelineStateWithFunction:(id<MTLFunction>)function error:(NSError**)error {
  return (SimulatedPipeline*)function;
}
@end

@interface SimulatedEncoder : NSObject <MTLComputeCommandEncoder> {
 @public
  simulator::Dispatch* now_;
}
@end
@implementation SimulatedEncoder
- (id)init {
  now_ = new simulator::Dispatch;
  return self;
}
- (void)dealloc {
  delete now_;
  [super dealloc];
}
- (void)got:(const char*)message {
  check_on_queue(message);
  now_->messages[message]++;
}
- (void)setComputePipelineState:(id<MTLComputePipelineState>)state {
  [self got:"setComputePipelineState"];
  if (!state) fail("setComputePipelineState got nil");
  now_->pipeline = *((SimulatedPipeline*)state)->pipeline_;
  now_->pipelines++;
}
- (void)bind:(simulator::Binding)binding at:(NSUInteger)index {
  if (index >= simulator::kBindings) fail("buffer " + std::to_string(index) + " does not exist");
  if (binding.offset > binding.memory->bytes)
    fail("byte offset " + std::to_string(binding.offset) + " is past the end of buffer " + std::to_string(index));
  binding.pipeline = now_->pipelines;
  now_->buffers[index] = binding;
}
- (void)setBuffer:(id<MTLBuffer>)buffer offset:(NSUInteger)offset atIndex:(NSUInteger)index {
  [self got:"setBuffer"];
  if (!buffer) fail("setBuffer got nil");
  [self bind:{*((SimulatedBuffer*)buffer)->memory_, offset} at:index];
}
- (void)setBytes:(const void*)bytes length:(NSUInteger)length atIndex:(NSUInteger)index {
  [self got:"setBytes"];
  if (length == 0 || length > 4096)
    fail("setBytes got " + std::to_string(length) + " bytes but takes between 1 and 4096");
  const auto memory = std::make_shared<simulator::Buffer>(length);
  memcpy(memory->data, bytes, length);
  [self bind:{memory, 0, true} at:index];
}
- (void)memoryBarrierWithScope:(MTLBarrierScope)scope {
  [self got:"memoryBarrierWithScope"];
  if (scope != MTLBarrierScopeBuffers) fail("memoryBarrierWithScope got another scope than that of buffers");
}
- (void)setThreadgroupMemoryLength:(NSUInteger)length atIndex:(NSUInteger)index {
  [self got:"setThreadgroupMemoryLength"];
  if (index >= simulator::kBindings) fail("threadgroup memory " + std::to_string(index) + " does not exist");
  if (length % 16) fail("threadgroup memory has " + std::to_string(length) + " bytes but must have a multiple of 16");
  now_->threadgroup_memory[index] = length;
}
- (void)dispatch:(MTLSize)threads group:(MTLSize)group by:(const char*)message {
  [self got:message];
  now_->threads[0] = threads.width, now_->threads[1] = threads.height, now_->threads[2] = threads.depth;
  now_->group[0] = group.width, now_->group[1] = group.height, now_->group[2] = group.depth;
  simulator::run(*now_);  // at once, so that the call that made an error raises it
  now_->messages.clear();
}
- (void)dispatchThreads:(MTLSize)threads threadsPerThreadgroup:(MTLSize)group {
  [self dispatch:threads group:group by:"dispatchThreads"];
}
- (void)dispatchThreadgroups:(MTLSize)groups threadsPerThreadgroup:(MTLSize)group {
  const MTLSize threads =
      MTLSizeMake(groups.width * group.width, groups.height * group.height, groups.depth * group.depth);
  [self dispatch:threads group:group by:"dispatchThreadgroups"];
}
- (void)endEncoding {
  fail("endEncoding was sent to the encoder that PyTorch shares among operators");
}
@end

// The queue, the command buffer and the encoder of a program without torch.
@interface SimulatedCommands : SimulatedEncoder <MTLCommandQueue, MTLCommandBuffer>
@end
@implementation SimulatedCommands
- (void)got:(const char*)message {
}
- (id<MTLCommandBuffer>)commandBuffer {
  return self;
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoder {
  return self;
}
- (void)endEncoding {
}
- (void)commit {
}
- (void)waitUntilCompleted {
}
- (NSError*)error {
  return nil;
}
@end

@implementation SimulatedDevice (Program)
- (id<MTLCommandQueue>)newCommandQueue {
  return [SimulatedCommands new];
}
- (id<MTLBuffer>)newBufferWithLength:(NSUInteger)length options:(MTLResourceOptions)options {
  return (id<MTLBuffer>)simulated_buffer(length);
}
@end

// ---- ATen/mps ----

namespace at::mps {

MPSStream::MPSStream(Stream stream) : _stream(stream), _serialQueue(&stream_queue) {}
MPSStream::~MPSStream() = default;
MTLComputeCommandEncoder_t MPSStream::commandEncoder() {
  check_on_queue("commandEncoder()");
  if (!_commandEncoder) _commandEncoder = [SimulatedEncoder new];
  return _commandEncoder;
}
void MPSStream::endKernelCoalescing() {
  check_on_queue("endKernelCoalescing()");
  [_commandEncoder release];
  _commandEncoder = nil;
}
// An operator must not call this. PyTorch itself commits when it needs to; see simulated_synchronize().
void MPSStream::synchronize(SyncType) { fail("an operator commits or waits"); }
MPSStream* getDefaultMPSStream() {
  static auto* const stream = new MPSStream(Stream(Stream::UNSAFE, Device(DeviceType::MPS, 0), 0));
  return stream;
}
MPSStream* getCurrentMPSStream() { return getDefaultMPSStream(); }

MPSDevice::MPSDevice() : _mtl_device([SimulatedDevice new]) {}
MPSDevice::~MPSDevice() = default;
MPSDevice* MPSDevice::getInstance() {
  static auto* const device = new MPSDevice;
  return device;
}

// The profiler notes the names of the kernels that are reported to it. Like the real one it ends the encoder.
namespace Profiler {
static std::string profiled;  // the names of the kernels, with a space after each
static const void* profiled_now;

MPSProfiler::MPSProfiler() = default;
MPSProfiler::~MPSProfiler() = default;
void MPSProfiler::StartTrace(const std::string&, bool) { m_signpost_types = SignpostTypes::RUN_OPERATION; }
void MPSProfiler::StopTrace() { m_signpost_types = SignpostTypes::SIGNPOST_NONE; }
uint64_t MPSProfiler::beginProfileKernel(const void* handle, const std::string& name, bool) {
  check_on_queue("beginProfileKernel()");
  if (!handle || profiled_now) fail("beginProfileKernel got no handle, or no endProfileKernel came before it");
  profiled_now = handle;
  profiled += name + " ";
  return 0;
}
void MPSProfiler::endProfileKernel(const void* handle, SyncType) {
  check_on_queue("endProfileKernel()");
  if (handle != profiled_now) fail("endProfileKernel got another handle than beginProfileKernel");
  profiled_now = nullptr;
  getDefaultMPSStream()->endKernelCoalescing();
}
}  // namespace Profiler
Profiler::MPSProfiler& getMPSProfiler() {
  static auto* const profiler = new Profiler::MPSProfiler;
  return *profiler;
}

void dispatch_sync_with_rethrow(dispatch_queue_t queue, void (^block)()) {
  __block std::exception_ptr error;
  dispatch_sync(queue, ^{
    try {
      block();
    } catch (...) {
      error = std::current_exception();
    }
  });
  if (error) std::rethrow_exception(error);
}

}  // namespace at::mps

// ---- for device.cpp ----

void* simulated_buffer(size_t bytes) {
  SimulatedBuffer* const buffer = [SimulatedBuffer new];
  buffer->memory_ = new std::shared_ptr<simulator::Buffer>(std::make_shared<simulator::Buffer>(bytes));
  return buffer;
}
id<MTLDevice> MTLCreateSystemDefaultDevice() { return [SimulatedDevice new]; }
void simulated_release(void* buffer) { [(id)buffer release]; }
void* simulated_contents(const void* buffer) {
  return buffer ? (*((SimulatedBuffer*)const_cast<void*>(buffer))->memory_)->data : nullptr;
}
void simulated_synchronize() {
  at::mps::dispatch_sync_with_rethrow(&stream_queue, ^{
    at::mps::getDefaultMPSStream()->endKernelCoalescing();
  });
}
std::string simulated_profile(bool on) {
  auto& profiler = at::mps::getMPSProfiler();
  on ? profiler.StartTrace("interval", false) : profiler.StopTrace();
  return std::exchange(at::mps::Profiler::profiled, "");
}
