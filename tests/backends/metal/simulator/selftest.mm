// Host code for test_simulator.py, which runs any shader and misuses Metal in every way that the simulator must find.
#include <ATen/core/Tensor.h>
#include <ATen/mps/MPSDevice.h>
#include <ATen/mps/MPSStream.h>
#include <ATen/ops/add.h>
#include <torch/library.h>

#include <exception>
#include <vector>

namespace {

id<MTLBuffer> buffer_of(const at::Tensor& t) { return __builtin_bit_cast(id<MTLBuffer>, t.storage().data()); }

id<MTLDevice> device() { return at::mps::MPSDevice::getInstance()->device(); }

std::string text_of(NSError* error) { return [[error localizedDescription] UTF8String]; }

id<MTLComputePipelineState> pipeline(const std::string& source, at::IntArrayRef constants) {
  NSError* error = nil;
  MTLCompileOptions* options = [MTLCompileOptions new];
  options.mathMode = MTLMathModeSafe;
  id<MTLLibrary> library = nil;
  if (source.rfind("SIMULATE", 0) == 0) {
    dispatch_data_t data = dispatch_data_create(source.data(), source.size(), dispatch_get_main_queue(),
                                                ^{
                                                });
    library = [device() newLibraryWithData:data error:&error];
    dispatch_release(data);
  } else {
    library = [device() newLibraryWithSource:[NSString stringWithUTF8String:source.c_str()]
                                     options:options
                                       error:&error];
  }
  [options release];
  TORCH_CHECK(library, "library: ", text_of(error));
  MTLFunctionConstantValues* values = [MTLFunctionConstantValues new];
  const std::vector<int> ints(constants.begin(), constants.end());
  [values setConstantValues:ints.data() type:MTLDataTypeInt withRange:NSMakeRange(0, ints.size())];
  id<MTLFunction> function = [library newFunctionWithName:@"k" constantValues:values error:&error];
  [values release];
  TORCH_CHECK(function, "function: ", text_of(error));
  id<MTLComputePipelineState> made = [device() newComputePipelineStateWithFunction:function error:&error];
  TORCH_CHECK(made, "pipeline: ", text_of(error));
  return made;
}

// Runs the kernel k of the source. The first `bound` tensors are buffers 0, 1 ...; n follows them by setBytes, unless
// it is negative. `shared` is the size of threadgroup memory 0 in bytes.
void launch(const std::string& source, at::TensorList tensors, int64_t bound, int64_t n, at::IntArrayRef grid,
            at::IntArrayRef group, int64_t shared, at::IntArrayRef constants) {
  id<MTLComputePipelineState> made = pipeline(source, constants);
  at::mps::dispatch_sync_with_rethrow(at::mps::getCurrentMPSStream()->queue(), ^{
    id<MTLComputeCommandEncoder> encoder = at::mps::getCurrentMPSStream()->commandEncoder();
    [encoder setComputePipelineState:made];
    for (int64_t i = 0; i < bound; i++) {
      const at::Tensor& t = tensors[i];
      if (t.defined() && t.numel())
        [encoder setBuffer:buffer_of(t) offset:t.storage_offset() * t.element_size() atIndex:i];
      else
        [encoder setBuffer:nil offset:0 atIndex:i];
    }
    const int bytes = int(n);
    if (n >= 0) [encoder setBytes:&bytes length:4 atIndex:bound];
    if (shared) [encoder setThreadgroupMemoryLength:shared atIndex:0];
    [encoder dispatchThreads:MTLSizeMake(grid[0], grid[1], grid[2])
        threadsPerThreadgroup:MTLSizeMake(group[0], group[1], group[2])];
  });
}

void misuse(const at::Tensor& x, int64_t which) {
  at::mps::MPSStream* const stream = at::mps::getCurrentMPSStream();
  if (which == 0) stream->commandEncoder();
  dispatch_block_t call = ^{
    at::add(x, x);
  };
  if (which == 1) dispatch_sync(stream->queue(), call);
  call = ^{
    TORCH_CHECK(false, "boom");
  };
  if (which == 2) dispatch_sync(stream->queue(), call);
  __block id<MTLComputeCommandEncoder> encoder = nil;
  at::mps::dispatch_sync_with_rethrow(stream->queue(), ^{
    encoder = stream->commandEncoder();
    const std::vector<char> bytes(5000);
    if (which == 3) [encoder endEncoding];
    if (which == 4) stream->synchronize(at::mps::SyncType::COMMIT);
    if (which == 5) [stream->commandBuffer() commit];
    if (which == 6) [encoder setBytes:bytes.data() length:5000 atIndex:0];
    if (which == 7) [encoder setBytes:bytes.data() length:0 atIndex:0];
    if (which == 8) [encoder setBuffer:buffer_of(x) offset:x.nbytes() + 4 atIndex:0];
    if (which == 9) [encoder setThreadgroupMemoryLength:24 atIndex:0];
    if (which == 10) TORCH_CHECK(false, "rethrown");
  });
  if (which == 11) [encoder setBuffer:nil offset:0 atIndex:0];
}

}  // namespace

TORCH_LIBRARY(simulator_test, m) {
  m.def("launch(str source, Tensor(a!)[] tensors, int bound, int n, int[] grid, int[] group, int shared, int[] "
        "constants) "
        "-> ()");
  m.def("misuse(Tensor x, int which) -> ()");
}
TORCH_LIBRARY_IMPL(simulator_test, MPS, m) {
  m.impl("launch", &launch);
  m.impl("misuse", &misuse);
}
