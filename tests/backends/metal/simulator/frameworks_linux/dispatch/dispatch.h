// The part of libdispatch that csrc/mps and torch's headers name; runtime.mm defines it.
#pragma once

typedef struct simulated_queue* dispatch_queue_t;
typedef void (^dispatch_block_t)(void);

#ifdef __cplusplus
extern "C" {
#endif
void dispatch_sync(dispatch_queue_t queue, dispatch_block_t block);
#ifdef __cplusplus
}
#endif
