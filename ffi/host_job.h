// The host's attention of one layer and some rows, cut into equal parts.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "attention.h"
#include "kernel.h"
#include "pool.h"
#include "workers.h"

namespace wscope {

// Null: the one that was found best for the shape.
struct KernelChoice {
  const Kernel* kernel = nullptr;
  int64_t prefetch_bytes = kOwnPrefetch;
};

// The list of (row, kv head, block) is cut into `num_parts` equal ranges. A part writes the heads
// that it has whole straight to the result; what begins or ends inside a head is kept as a running
// state, at most two a part, and merged in the order of the parts. So the result depends on the
// number of parts only, whoever runs them. The job owns its copy of q, its scratch and its result.
class HostJob {
 public:
  // `table` lists the slots of the rows one after the other, row r has [row_ptr[r], row_ptr[r + 1])
  // of it. The slots are committed in `pool`, which may be null if there are none. At least one
  // part; throws std::bad_alloc.
  HostJob(const AttentionShape& shape, std::shared_ptr<Pool> pool, int layer, int num_rows,
          const int32_t* row_ptr,  // [num_rows + 1]
          const int32_t* table,    // indexed by row_ptr
          int max_parts, const KernelChoice& choice = {});

  // The same over any blocks: `blocks` of the rows one after the other, and bits of the entries
  // that count, [num blocks, D / 32] (see kernel.h). Both must outlive the parts.
  HostJob(const AttentionShape& shape, int num_rows, const int64_t* row_ptr,
          std::vector<const uint8_t*> blocks, const uint32_t* selected, int max_parts);

  // Number of parts to run: 0 if no row has a block, else at most max_parts.
  int num_parts() const { return num_parts_; }
  int num_rows() const { return num_rows_; }
  int64_t num_blocks() const { return static_cast<int64_t>(blocks_.size()); }
  const AttentionShape& shape() const { return shape_; }

  float* q() { return q_.get(); }                  // [b, H, K], to be filled before the first part
  const float* o() const { return o_.get(); }      // [b, H, V], 0 for a row with no block
  const float* lse() const { return lse_.get(); }  // [b, H], -inf for a row with no block

  // Any thread, each part once. Never throws.
  void RunPart(int part);
  // After all parts.
  void Finish();

  int64_t q_size() const { return int64_t{num_rows_} * shape_.num_q_heads * shape_.key_dim; }
  int64_t o_size() const { return int64_t{num_rows_} * shape_.num_q_heads * shape_.value_dim; }
  int64_t lse_size() const { return int64_t{num_rows_} * shape_.num_q_heads; }

 private:
  // Blocks [first, last) of one row and kv head.
  struct Segment {
    int row, head;
    int64_t first, last;  // In blocks_.
    bool whole;           // All blocks of the row.
  };

  Segment SegmentAt(int64_t item, int64_t end) const;
  SoftmaxState State(int part, int slot) const;
  int64_t HeadIndex(const Segment& segment) const {
    return int64_t{segment.row} * shape_.num_kv_heads + segment.head;
  }
  void WriteHead(int64_t head_index, const SoftmaxState& state);

  void Allocate(int max_parts);

  const AttentionShape shape_;
  const HeadShape head_shape_;
  const Kernel& kernel_;
  const int64_t prefetch_bytes_;
  const uint32_t* const selected_ = nullptr;
  const std::shared_ptr<Pool> pool_;
  const int num_rows_;
  int num_parts_ = 0;
  std::vector<int64_t> row_ptr_;        // [num_rows + 1], into blocks_
  std::vector<const uint8_t*> blocks_;  // Rows one after the other.
  std::unique_ptr<float[]> q_;
  std::unique_ptr<float[]> o_;
  std::unique_ptr<float[]> lse_;
  int64_t scratch_bytes_ = 0;  // Of one part.
  std::unique_ptr<uint8_t[]>
      scratch_;                      // [num_parts, scratch_bytes_] from the first 64-byte line on
  std::unique_ptr<float[]> states_;  // [num_parts, 2, (H / G) * (V + 2)]
  std::vector<int64_t> state_head_;  // [num_parts, 2]: row * G + kv head, -1 = unused
};

// The job as a task for the workers; it has at least one part. The first part sleeps `delay_ms`
// before it begins (fault injection).
std::shared_ptr<Task> MakeTask(const std::shared_ptr<HostJob>& job, int delay_ms = 0);

}  // namespace wscope
