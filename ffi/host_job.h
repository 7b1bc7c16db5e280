// The host's attention of one layer and some rows, cut into parts.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "attention.h"
#include "job_memory.h"
#include "kernel.h"
#include "pool.h"
#include "workers.h"

namespace wscope {

// Null: the one that was found best for the shape.
struct KernelChoice {
  const Kernel* kernel = nullptr;
  int64_t prefetch_bytes = kOwnPrefetch;
};

// The blocks of some rows, one row after the other. The same lie in every layer of a pool, so that
// the jobs of a step share one list.
struct RowBlocks {
  // Row r has the slots [row_ptr[r], row_ptr[r + 1]) of `table`, committed in `pool`, which may be
  // null if there are none.
  RowBlocks(const Pool* pool, int num_rows, const int32_t* row_ptr, const int32_t* table);
  RowBlocks(int num_rows, const int64_t* row_ptr, std::vector<const uint8_t*> blocks)
      : row_ptr(row_ptr, row_ptr + num_rows + 1), blocks(std::move(blocks)) {}

  int num_rows() const { return static_cast<int>(row_ptr.size()) - 1; }

  std::vector<int64_t> row_ptr;        // [num_rows + 1], into blocks
  std::vector<const uint8_t*> blocks;  // Of layer 0.
};

// The list of (row, kv head, block) is cut into parts for a number of workers, a few each: a half
// of the list in equal parts, then a half of what is left, and so on, so that workers of unequal
// speed end together. Parts begin where a head does if that is not far. A part writes the heads
// that it has whole straight to the result; what begins or ends inside a head is kept as a running
// state, at most two a part. A head's states merge in pairs, then pairs of pairs, each as soon as
// both are there, so that little is left to do behind the last part; the pairs follow from the
// cuts. So the result depends on the number of workers only, whoever runs the parts. Each part
// widens the query heads that it needs.
class HostJob {
 public:
  static constexpr int kMaxRounds = 8;

  // Over the rows' blocks in a layer of `pool`, which may be null if there are none. At least one
  // worker; throws std::bad_alloc.
  HostJob(const AttentionShape& shape, std::shared_ptr<Pool> pool, int layer,
          std::shared_ptr<const RowBlocks> rows, int workers, const KernelChoice& choice = {});

  // Over any blocks, and bits of the entries that count, [num blocks, D / 32] (see kernel.h). Both
  // must outlive the parts.
  HostJob(const AttentionShape& shape, std::shared_ptr<const RowBlocks> rows,
          const uint32_t* selected, int workers);

  // Before the first part, one of the two. The memory is somebody else's and outlives the parts; q
  // may come later than the call.
  void Bind(const void* q,  // [b, H, K] in `q_storage`
            Storage q_storage,
            float* o,     // [b, H, V], 0 for a row with no block
            float* lse);  // [b, H], -inf for a row with no block
  // The job copies q and has a result of its own.
  void BindCopy(const void* q, Storage q_storage);

  // Number of parts to run: 0 if no row has a block.
  int num_parts() const { return num_parts_; }
  int num_rows() const { return rows_->num_rows(); }
  int64_t num_blocks() const { return static_cast<int64_t>(rows_->blocks.size()); }
  const AttentionShape& shape() const { return shape_; }

  const float* o() const { return o_; }
  const float* lse() const { return lse_; }
  // After all parts: there was no memory for one of them.
  bool is_void() const { return is_void_; }

  // Any thread, each part once. Never throws.
  void RunPart(int part);
  // The step-th piece of what a part reads, for a worker that may fetch it before its turn; empty
  // beyond what its core's cache keeps until then.
  struct Bytes {
    const uint8_t* begin;
    int64_t count;
  };
  Bytes Near(int part, int step) const;
  // After all parts. If there was no memory for one of them the result is void.
  void Finish();
  // Instead of all parts: makes lse NaN, so that nothing computed from it looks right.
  void Void();

  int64_t q_size() const { return int64_t{num_rows()} * shape_.num_q_heads * shape_.key_dim; }
  int64_t o_size() const { return int64_t{num_rows()} * shape_.num_q_heads * shape_.value_dim; }
  int64_t lse_size() const { return int64_t{num_rows()} * shape_.num_q_heads; }

 private:
  // Blocks [first, last) of one row and kv head.
  struct Segment {
    int row, head;
    int64_t first, last;  // In the rows' blocks.
    bool whole;           // All blocks of the row.
  };

  Segment SegmentAt(int64_t item, int64_t end) const;
  // The first block's head.
  const uint8_t* HeadAt(const Segment& segment) const {
    return rows_->blocks[segment.first] + layer_offset_ + segment.head * shape_.head_bytes();
  }
  // Where the head of a segment begins in the list.
  int64_t HeadBegin(const Segment& segment) const;
  // Where a part keeps the state of a head that begins in an earlier part, or else of one that ends
  // in a later part; null if there is no memory.
  float* Kept(int part, bool begins_earlier);
  int64_t HeadIndex(const Segment& segment) const {
    return int64_t{segment.row} * shape_.num_kv_heads + segment.head;
  }
  // The query heads of one kv head as floats, [H / G, K].
  const float* Queries(int64_t head_index, float* scratch) const;
  void WriteHead(int64_t head_index, const SoftmaxState& state);
  // The part has kept its state of the segment's head: merges with what is there, and writes the
  // head if that is all.
  void MergeHead(const Segment& segment, int part);
  int PartOf(int64_t item) const;

  int64_t kept_bytes() const {
    return 2 * num_parts_ * shape_.state_size() * static_cast<int64_t>(sizeof(float));
  }
  void Cut(int workers);
  // A place to cut near `item`: the end of a head if one is within `most` items.
  int64_t CutNear(int64_t item, int64_t most) const;
  void Forget();

  const AttentionShape shape_;
  const HeadShape head_shape_;
  const Kernel& kernel_;
  const int64_t prefetch_bytes_;
  const uint32_t* const selected_ = nullptr;
  const std::shared_ptr<Pool> pool_;
  const std::shared_ptr<const RowBlocks> rows_;
  const int64_t layer_offset_ = 0;  // From a block of layer 0 to the same of this layer.
  int num_parts_ = 0;
  std::vector<int64_t> part_begins_;  // [num_parts + 1], in the list.
  const void* q_ = nullptr;
  Storage q_storage_ = Storage::kFloat32;
  float* o_ = nullptr;
  float* lse_ = nullptr;
  std::unique_ptr<uint8_t[]> own_;  // o, lse and q of BindCopy.
  // What parts keep. The first that has something to keep takes the memory: the jobs of a whole
  // step may wait for their turn.
  std::once_flag kept_once_;
  SpareBuffers::Buffer kept_;  // [num_parts, 2, state_size]
  // [num_parts]: of two states that merge one is kept, by the part of the right one.
  std::unique_ptr<std::atomic<bool>[]> half_kept_;
  std::atomic<bool> is_void_{false};
};

// The job as a task for the workers; it has at least one part. The first part sleeps `delay_ms`
// before it begins (fault injection). `ended()` is called when the result is there, or void if the
// task is dropped.
std::shared_ptr<Task> MakeTask(const std::shared_ptr<HostJob>& job, int delay_ms = 0,
                               const std::function<void()>& ended = {});

}  // namespace wscope
