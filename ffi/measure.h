// What one kernel, and reading alone, take on the real workers: for benchmarks and for calibration.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "attention.h"
#include "kernel.h"
#include "pool.h"

namespace wscope {

struct Measured {
  int64_t wall_ns;  // From the first worker's start to the last one's end.
  int64_t cpu_ns;   // CPU time of all workers together.
};

// One job over `num_rows` rows of equal length, whose blocks are `table` [num_rows, blocks] in
// `layer`, cut as a step's is. Throws std::runtime_error without workers.
Measured MeasureAttention(const AttentionShape& shape, const std::shared_ptr<Pool>& pool, int layer,
                          int num_rows, const int32_t* row_ptr, const int32_t* table,
                          const Kernel& kernel, int64_t prefetch_bytes);

// The same work over slots [0, num_slots), had they been written in rows: a worker packs each head
// of a block (pack.h) and attends to that. Beside MeasureAttention it says what packing when blocks
// are written is worth; a kernel made for rows might be faster than this.
Measured MeasureRows(const AttentionShape& shape, const Pool& pool, int layer, int num_slots,
                     const Kernel& kernel);

// Reads slots [0, num_slots) of a layer with the loads of `kernel` and adds nothing to it: what the
// memory gives. The workers take small contiguous parts.
Measured MeasureRead(const Pool& pool, int layer, int num_slots, const Kernel& kernel,
                     int64_t prefetch_bytes);

// Bytes a second.
struct Rates {
  double read;
  double link;
};

// The workers read all of `read` and a thread copies all of `link` in chunks, both over and over
// and at the same time, until `duration_ns` has passed; a null pool leaves its side idle. The
// copies go over the link to `device`, or without one to memory, at `link_rate` bytes a second and
// few at a time, or without a rate as fast as it goes (link_copies.h). Throws std::runtime_error
// without workers, without such a device, or when a copy fails; OutOfMemory.
Rates MeasureStreams(const Pool* read, const Kernel& kernel, const Pool* link,
                     std::optional<int> device, int64_t chunk_bytes, int64_t duration_ns,
                     std::optional<double> link_rate);

}  // namespace wscope
