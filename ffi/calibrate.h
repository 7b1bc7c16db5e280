// Timings that start a roofline: the real kernel on the real workers, and a copy.
#pragma once

#include <cstdint>

#include "attention.h"

namespace wscope {

// Nanoseconds of one host job over `num_blocks` blocks of one row: the median of a few runs after a
// first one, over memory that no cache holds. Makes and frees a pool of its own. Throws
// std::invalid_argument for a shape or count that makes no sense, OutOfMemory, std::runtime_error
// if there are no workers.
int64_t TimeAttention(const AttentionShape& shape, int num_blocks);

// Nanoseconds of one memcpy of `num_bytes` between huge pages that no cache holds, by the calling
// thread: the median of a few after a first one. Throws std::invalid_argument if num_bytes is not
// positive, OutOfMemory.
int64_t TimeCopy(int64_t num_bytes);

}  // namespace wscope
