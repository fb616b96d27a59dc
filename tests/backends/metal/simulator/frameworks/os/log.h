// The part of the unified logging system that torch's headers name.
#pragma once

typedef struct os_log_s* os_log_t;
