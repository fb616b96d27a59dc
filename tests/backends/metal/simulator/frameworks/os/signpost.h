// The part of os/signpost.h that torch's headers name.
#pragma once

#include <os/log.h>

#include <cstdint>

typedef uint64_t os_signpost_id_t;
typedef uint8_t os_signpost_type_t;

#ifndef __APPLE__
#include <csignal>
inline uint64_t clock_gettime_nsec_np(int) { return 0; }  // a function of macOS, which torch's header calls
#endif
