// The part of Metal that csrc/mps and torch's headers name.
#pragma once

#include <Foundation/Foundation.h>

#ifndef __APPLE__
#define __MAC_OS_X_VERSION_MAX_ALLOWED 150000  // the SDK that these declarations stand for
#endif

typedef struct {
  NSUInteger width, height, depth;
} MTLSize;
static inline MTLSize MTLSizeMake(NSUInteger width, NSUInteger height, NSUInteger depth) {
  MTLSize size = {width, height, depth};
  return size;
}

typedef NS_ENUM(NSUInteger, MTLDataType) { MTLDataTypeInt = 29 };
typedef NS_ENUM(NSUInteger, MTLLanguageVersion) { MTLLanguageVersion3_1 = (3 << 16) + 1 };
typedef NS_ENUM(NSUInteger, MTLResourceOptions) { MTLResourceStorageModeShared = 0 };
typedef NS_ENUM(NSUInteger, MTLBarrierScope) { MTLBarrierScopeBuffers = 1 };
typedef NS_ENUM(NSInteger, MTLMathMode) { MTLMathModeSafe = 0, MTLMathModeFast = 2 };
typedef NS_ENUM(NSInteger, MTLMathFloatingPointFunctions) {
  MTLMathFloatingPointFunctionsFast = 0,
  MTLMathFloatingPointFunctionsPrecise = 1
};

@interface MTLCompileOptions : NSObject
INSTANCE_VARIABLES(BOOL fast_; MTLLanguageVersion version_; MTLMathMode math_;
                   MTLMathFloatingPointFunctions functions_;)
@property(readwrite, nonatomic) BOOL fastMathEnabled;
@property(readwrite, nonatomic) MTLMathMode mathMode;
@property(readwrite, nonatomic) MTLMathFloatingPointFunctions mathFloatingPointFunctions;
@property(readwrite, nonatomic) MTLLanguageVersion languageVersion;
@end

@interface MTLFunctionConstantValues : NSObject
INSTANCE_VARIABLES(void* values_;)
- (void)setConstantValues:(const void*)values type:(MTLDataType)type withRange:(NSRange)range;
@end

@protocol MTLBuffer <NSObject>
- (void*)contents;
@end

@protocol MTLFunction <NSObject>
@end

@protocol MTLLibrary <NSObject>
- (id<MTLFunction>)newFunctionWithName:(NSString*)name
                        constantValues:(MTLFunctionConstantValues*)values
                                 error:(NSError**)error;
@end

@protocol MTLComputePipelineState <NSObject>
@property(readonly) NSUInteger maxTotalThreadsPerThreadgroup;
@property(readonly) NSUInteger threadExecutionWidth;
@end

@protocol MTLCommandQueue;
@protocol MTLDevice <NSObject>
- (id<MTLLibrary>)newLibraryWithSource:(NSString*)source options:(MTLCompileOptions*)options error:(NSError**)error;
- (id<MTLComputePipelineState>)newComputePipelineStateWithFunction:(id<MTLFunction>)function error:(NSError**)error;
- (id<MTLCommandQueue>)newCommandQueue;
- (id<MTLBuffer>)newBufferWithLength:(NSUInteger)length options:(MTLResourceOptions)options;
@end

@protocol MTLCommandEncoder <NSObject>
- (void)endEncoding;
@end

@protocol MTLComputeCommandEncoder <MTLCommandEncoder>
- (void)setComputePipelineState:(id<MTLComputePipelineState>)state;
- (void)setBuffer:(id<MTLBuffer>)buffer offset:(NSUInteger)offset atIndex:(NSUInteger)index;
- (void)setBytes:(const void*)bytes length:(NSUInteger)length atIndex:(NSUInteger)index;
- (void)memoryBarrierWithScope:(MTLBarrierScope)scope;
- (void)setThreadgroupMemoryLength:(NSUInteger)length atIndex:(NSUInteger)index;
- (void)dispatchThreads:(MTLSize)threads threadsPerThreadgroup:(MTLSize)group;
- (void)dispatchThreadgroups:(MTLSize)groups threadsPerThreadgroup:(MTLSize)group;
@end

@protocol MTLCommandBuffer <NSObject>
- (id<MTLComputeCommandEncoder>)computeCommandEncoder;
- (void)commit;
- (void)waitUntilCompleted;
@property(readonly) NSError* error;
@end

@protocol MTLCommandQueue <NSObject>
- (id<MTLCommandBuffer>)commandBuffer;
@end
@protocol MTLSharedEvent <NSObject>
@end
typedef void (^MTLCommandBufferHandler)(id<MTLCommandBuffer>);

@class MTLCaptureManager;

#ifdef __cplusplus
extern "C"
#endif
    __attribute__((visibility("default"))) id<MTLDevice> MTLCreateSystemDefaultDevice(void);
