// Makes a pipeline of every Metal kernel as csrc/mps/mps.mm does, without torch, and prints what Metal says of it. Then
// runs one kernel, if the device runs kernels, and checks its results.
//   pipelines           prints a line for each kernel
//   pipelines FOLDER    writes the text of each kernel into the folder, for xcrun metal
//
// On macOS, after python shaders/embed.py build/shaders.cpp:
//   c++ -std=c++20 -I. tests/exhaustive/metal/pipelines.mm build/shaders.cpp -framework Foundation -framework Metal
#import <Foundation/Foundation.h>
#import <Metal/Metal.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "csrc/mps/source.h"

using namespace rope;
using namespace rope::mps;

const struct {
  const char *file, *family;
  int channels;  // the largest V, or 0
  bool offsets;  // there are kernels for offsets of 32 and of 64 bits
} kFamilies[] = {
    {"rotate", "rotate", 8, true},
    {"norm", "norm_rotate", 8, true},
    {"norm", "norm_rotate_wide", 4, false},
    {"norm_backward", "norm_backward", 4, false},
    {"norm_backward", "norm_backward_wide", 4, false},
    {"norm_backward", "sum_parts", 0, false},
    {"cos_sin", "cos_sin", 0, false},
};

double milliseconds() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Returns the object. If there is none, ends the program with Metal's message.
id made(id object, const Kernel& kernel, NSError* error) {
  if (object) return object;
  std::printf("%s: %s\n", kernel.name().c_str(), error ? [[error localizedDescription] UTF8String] : "no reason given");
  std::exit(1);
}

id<MTLComputePipelineState> pipeline(id<MTLDevice> device, const Kernel& kernel, const Constants& constants) {
  MTLCompileOptions* options = [MTLCompileOptions new];
  options.languageVersion = MTLLanguageVersion3_1;
  options.fastMathEnabled = NO;
  options.mathMode = MTLMathModeSafe;
  options.mathFloatingPointFunctions = MTLMathFloatingPointFunctionsPrecise;
  MTLFunctionConstantValues* values = [MTLFunctionConstantValues new];
  [values setConstantValues:&constants type:MTLDataTypeInt withRange:NSMakeRange(0, sizeof constants / sizeof(int))];
  NSString* source = [NSString stringWithUTF8String:kernel.source().c_str()];
  NSString* name = [NSString stringWithUTF8String:kernel.name().c_str()];
  NSError* error = nil;
  const double begin = milliseconds();
  id<MTLLibrary> library = made([device newLibraryWithSource:source options:options error:&error], kernel, error);
  const double middle = milliseconds();
  id<MTLFunction> f = made([library newFunctionWithName:name constantValues:values error:&error], kernel, error);
  id<MTLComputePipelineState> p = made([device newComputePipelineStateWithFunction:f error:&error], kernel, error);
  std::printf("%-28s library %6.1f ms, pipeline %6.1f ms, maxTotalThreadsPerThreadgroup %4d, threadExecutionWidth %d\n",
              kernel.name().c_str(), middle - begin, milliseconds() - middle, int([p maxTotalThreadsPerThreadgroup]),
              int([p threadExecutionWidth]));
  return p;
}

// Runs cos_sin for the positions 0 .. 999 and the frequency 1. Returns the largest error, or -1 if it did not run.
double error_of_cos_sin(id<MTLDevice> device, id<MTLComputePipelineState> p) {
  constexpr int n = 1000;
  CosSinArgs params{};
  params.axes = params.pairs = params.position_strides[1] = params.inv_freq_strides[2] = 1;
  params.tokens = n, params.factor_hi = 1, params.position_dtype = DType::kInt32;
  id<MTLBuffer> buffers[4];  // positions, inv_freq, cos, sin
  for (auto& buffer : buffers)
    if (!(buffer = [device newBufferWithLength:n * 4 options:MTLResourceStorageModeShared])) return -1;
  id<MTLCommandBuffer> commands = [[device newCommandQueue] commandBuffer];
  id<MTLComputeCommandEncoder> encoder = [commands computeCommandEncoder];
  [encoder setComputePipelineState:p];
  [encoder setBytes:&params length:sizeof params atIndex:0];
  for (int i = 0; i < 4; i++) [encoder setBuffer:buffers[i] offset:0 atIndex:NSUInteger(i + 1)];
  for (int i = 0; i < n; i++) ((int*)[buffers[0] contents])[i] = i;
  *(float*)[buffers[1] contents] = 1.0f;
  [encoder dispatchThreads:MTLSizeMake(1, n, 1) threadsPerThreadgroup:MTLSizeMake(1, 32, 1)];
  [encoder endEncoding];
  [commands commit];
  [commands waitUntilCompleted];
  if ([commands error]) return -1;
  const float *cos = (const float*)[buffers[2] contents], *sin = (const float*)[buffers[3] contents];
  double error = 0;
  for (int i = 0; i < n; i++) error = std::fmax(error, std::hypot(cos[i] - std::cos(i), sin[i] - std::sin(i)));
  return error;
}

int main(int count, char** arguments) {
  id<MTLDevice> device = MTLCreateSystemDefaultDevice();
  id<MTLComputePipelineState> last = nil;
  for (const auto& [file, family, channels, offsets] : kFamilies)
    for (const char* type : {"half", "bfloat", "float"})
      for (int v : {0, 1, 4, 8})
        for (int bits : {0, 32, 64}) {
          if ((v == 0) != (channels == 0) || v > channels || (v == 8 && *type == 'f') || offsets != (bits > 0))
            continue;
          const Kernel kernel = {file, family, type, v, bits};
          const Constants usual = {.tensors = 2,
                                   .position_bytes = 4,
                                   .vectors = v > 1,
                                   .normalised = *family == 'n' ? 3 : 0,
                                   .lanes = 32,
                                   .position_dtype = int(DType::kInt32)};
          if (count == 1) last = pipeline(device, kernel, usual);
          if (count > 1) std::ofstream(std::string(arguments[1]) + "/" + kernel.name() + ".metal") << kernel.source();
        }
  if (count > 1) return 0;
  const double error = error_of_cos_sin(device, last);
  std::printf(error < 0 ? "the device runs no kernels\n" : "cos_sin_float: error %.1e\n", error);
  return error > 5e-7;
}
