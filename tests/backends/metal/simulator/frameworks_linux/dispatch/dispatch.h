// The part of libdispatch that csrc/mps and torch's headers name; runtime.mm defines it.
#pragma once

#include <stddef.h>

typedef struct simulated_queue* dispatch_queue_t;
typedef struct simulated_data* dispatch_data_t;
typedef void (^dispatch_block_t)(void);

#ifdef __cplusplus
extern "C" {
#endif
dispatch_queue_t dispatch_get_main_queue(void);
void dispatch_sync(dispatch_queue_t queue, dispatch_block_t block);
dispatch_data_t dispatch_data_create(const void* bytes, size_t length, dispatch_queue_t queue,
                                     dispatch_block_t destroy);
void dispatch_release(dispatch_data_t data);
#ifdef __cplusplus
}
#endif
