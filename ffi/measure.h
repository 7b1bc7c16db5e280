// What one kernel, and reading alone, take on the real workers: for benchmarks and for calibration.
#pragma once

#include <cstdint>
#include <memory>

#include "attention.h"
#include "kernel.h"
#include "pool.h"

namespace wscope {

struct Measured {
  int64_t wall_ns;  // From the first worker's start to the last one's end.
  int64_t cpu_ns;   // CPU time of the part that took most of it.
};

// One job over `num_rows` rows of equal length, whose blocks are `table` [num_rows, blocks] in
// `layer`, cut into as many parts as there are workers. Throws std::runtime_error without workers.
Measured MeasureAttention(const AttentionShape& shape, const std::shared_ptr<Pool>& pool, int layer,
                          int num_rows, const int32_t* row_ptr, const int32_t* table,
                          const Kernel& kernel, int64_t prefetch_bytes);

// Reads slots [0, num_slots) of a layer with the loads of `kernel` and adds nothing to it: what the
// memory gives. The workers get equal contiguous parts.
Measured MeasureRead(const Pool& pool, int layer, int num_slots, const Kernel& kernel,
                     int64_t prefetch_bytes);

}  // namespace wscope
