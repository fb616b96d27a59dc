// assert() of kernels. A failure ends the launch with an error; NDEBUG does not remove it.
#pragma once

#include "../emulator.h"

#define EMULATED_TEXT(x) #x
#define EMULATED_STRING(x) EMULATED_TEXT(x)
#define assert(...) \
  ((__VA_ARGS__)    \
       ? void(0)    \
       : emulator::fail("device-side assert triggered: " #__VA_ARGS__ ", " __FILE__ ":" EMULATED_STRING(__LINE__)))
