// The part of Foundation that csrc/mps and torch's headers name. Two compilers read these declarations: clang with the
// GNU runtime on Linux, where runtime.mm defines the classes, and a cross-compiler for macOS, which has
// objc/NSObject.h.
#pragma once

#include <objc/objc.h>

#ifdef __APPLE__
#include <Block.h>
#include <objc/NSObjCRuntime.h>
#include <objc/NSObject.h>
#define INSTANCE_VARIABLES(...)
#else
#define INSTANCE_VARIABLES(...) \
  {                             \
   @public                      \
    __VA_ARGS__                 \
  }  // in the GNU runtime they are part of the interface
#undef nil
#define nil nullptr  // (id)0 would not convert to NSError**
typedef unsigned long NSUInteger;
typedef long NSInteger;
@protocol NSObject
- (oneway void)release;
- (BOOL)respondsToSelector:(SEL)selector;
@end
__attribute__((objc_root_class))
@interface NSObject<NSObject> {
  Class isa;
}
+ (id)alloc;
+ (id)new;
- (id)init;
- (void)dealloc;
@end
@interface NSAutoreleasePool : NSObject
- (void)drain;
@end
#endif

#include <dispatch/dispatch.h>

#define NS_ENUM(type, name) \
  enum name : type name;    \
  enum name : type

typedef struct {
  NSUInteger location, length;
} NSRange;
static inline NSRange NSMakeRange(NSUInteger location, NSUInteger length) {
  NSRange range = {location, length};
  return range;
}

@interface NSString : NSObject
INSTANCE_VARIABLES(const char* bytes_;)
+ (NSString*)stringWithUTF8String:(const char*)text;
@property(readonly) const char* UTF8String;
@end

@interface NSError : NSObject
INSTANCE_VARIABLES(NSString* text_;)
@property(readonly, copy) NSString* localizedDescription;
@end

@class NSArray, NSDictionary, NSNumber, NSURL;
