// Host code for test_simulator.py, which runs any shader and misuses Metal in every way that the simulator must find.
#include <ATen/core/Tensor.h>
#include <ATen/mps/MPSDevice.h>
#include <ATen/mps/MPSStream.h>
#include <ATen/ops/add.h>
#include <torch/library.h>

#include <vector>

namespace {

id<MTLBuffer> buffer_of(const at::Tensor& t) { return __builtin_bit_cast(id<MTLBuffer>, t.storage().data()); }

id<MTLComputePipelineState> pipeline(const std::string& source, const std::string& kernel, at::IntArrayRef constants) {
  const id<MTLDevice> device = at::mps::MPSDevice::getInstance()->device();
  NSError* error = nil;
  MTLCompileOptions* const options = [MTLCompileOptions new];
  options.languageVersion = MTLLanguageVersion3_1;
  options.fastMathEnabled = NO;
  options.mathMode = MTLMathModeSafe;
  options.mathFloatingPointFunctions = MTLMathFloatingPointFunctionsPrecise;
  id<MTLLibrary> library = [device newLibraryWithSource:[NSString stringWithUTF8String:source.c_str()]
                                                options:options
                                                  error:&error];
  TORCH_CHECK(library, "library: ", [[error localizedDescription] UTF8String]);
  MTLFunctionConstantValues* const values = [MTLFunctionConstantValues new];
  const std::vector<int> ints(constants.begin(), constants.end());
  [values setConstantValues:ints.data() type:MTLDataTypeInt withRange:NSMakeRange(0, ints.size())];
  id<MTLFunction> function = [library newFunctionWithName:[NSString stringWithUTF8String:kernel.c_str()]
                                           constantValues:values
                                                    error:&error];
  TORCH_CHECK(function, "function: ", [[error localizedDescription] UTF8String]);
  return [device newComputePipelineStateWithFunction:function error:&error];
}

// Runs a kernel of the source. The first `bound` tensors are buffers 0, 1 ...; n follows them by setBytes, unless it is
// negative. `shared` is the size of threadgroup memory 0 in bytes.
void launch(const std::string& source, at::TensorList tensors, int64_t bound, int64_t n, at::IntArrayRef grid,
            at::IntArrayRef group, int64_t shared, at::IntArrayRef constants, const std::string& kernel) {
  id<MTLComputePipelineState> made = pipeline(source, kernel, constants);
  at::mps::dispatch_sync_with_rethrow(at::mps::getCurrentMPSStream()->queue(), ^{
    id<MTLComputeCommandEncoder> encoder = at::mps::getCurrentMPSStream()->commandEncoder();
    [encoder setComputePipelineState:made];
    for (int64_t i = 0; i < bound; i++) {
      const int64_t offset = tensors[i].storage_offset() * tensors[i].element_size();
      [encoder setBuffer:buffer_of(tensors[i]) offset:offset atIndex:i];
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
    if (which == 4) [encoder endEncoding];
    if (which == 5) stream->synchronize(at::mps::SyncType::COMMIT);
    if (which == 6) [encoder setBytes:bytes.data() length:5000 atIndex:0];
    if (which == 7) [encoder setBytes:bytes.data() length:0 atIndex:0];
    if (which == 8) [encoder setBuffer:nil offset:0 atIndex:0];
    if (which == 9) [encoder setBuffer:buffer_of(x) offset:x.nbytes() + 4 atIndex:0];
    if (which == 10) TORCH_CHECK(false, "rethrown");
  });
  if (which == 3) [encoder setBuffer:buffer_of(x) offset:0 atIndex:0];
}

}  // namespace

TORCH_LIBRARY(simulator_test, m) {
  m.def("launch(str source, Tensor(a!)[] tensors, int bound, int n, int[] grid, int[] group, int shared, int[] "
        "constants, "
        "str kernel='k') -> ()");
  m.def("misuse(Tensor x, int which) -> ()");
}
TORCH_LIBRARY_IMPL(simulator_test, MPS, m) {
  m.impl("launch", &launch);
  m.impl("misuse", &misuse);
}
