#include "host_job.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <thread>
#include <utility>

#include "dispatch.h"

namespace wscope {
namespace {

constexpr int64_t kLine = 64;  // What kernels want their scratch aligned to.

// Not cleared: every number is written before it is read.
std::unique_ptr<float[]> Floats(int64_t count) {
  return std::unique_ptr<float[]>(new float[count]);
}

}  // namespace

HostJob::HostJob(const AttentionShape& shape, std::shared_ptr<Pool> pool, int layer, int num_rows,
                 const int32_t* row_ptr, const int32_t* table, int max_parts,
                 const KernelChoice& choice)
    : shape_(shape),
      head_shape_(HeadOf(shape)),
      kernel_(choice.kernel ? *choice.kernel : KernelFor(head_shape_)),
      prefetch_bytes_(choice.prefetch_bytes),
      pool_(std::move(pool)),
      num_rows_(num_rows) {
  row_ptr_.reserve(num_rows + 1);
  for (int row = 0; row <= num_rows; ++row) row_ptr_.push_back(row_ptr[row] - row_ptr[0]);
  blocks_.reserve(row_ptr_.back());
  for (int32_t at = row_ptr[0]; at < row_ptr[num_rows]; ++at) {
    blocks_.push_back(pool_->Block(layer, table[at]));
  }
  Allocate(max_parts);
}

HostJob::HostJob(const AttentionShape& shape, int num_rows, const int64_t* row_ptr,
                 std::vector<const uint8_t*> blocks, const uint32_t* selected, int max_parts)
    : shape_(shape),
      head_shape_(HeadOf(shape)),
      kernel_(KernelFor(head_shape_)),
      prefetch_bytes_(kOwnPrefetch),
      selected_(selected),
      num_rows_(num_rows),
      row_ptr_(row_ptr, row_ptr + num_rows + 1),
      blocks_(std::move(blocks)) {
  Allocate(max_parts);
}

void HostJob::Allocate(int max_parts) {
  q_ = Floats(q_size());
  o_ = Floats(o_size());
  lse_ = Floats(lse_size());
  for (int row = 0; row < num_rows_; ++row) {
    if (row_ptr_[row] != row_ptr_[row + 1]) continue;
    const int64_t row_o = int64_t{shape_.num_q_heads} * shape_.value_dim;
    std::fill_n(o_.get() + row * row_o, row_o, 0.0f);
    std::fill_n(lse_.get() + int64_t{row} * shape_.num_q_heads, shape_.num_q_heads,
                -std::numeric_limits<float>::infinity());
  }
  num_parts_ = static_cast<int>(std::min<int64_t>(max_parts, num_blocks() * shape_.num_kv_heads));
  scratch_bytes_ = (kernel_.scratch_bytes(head_shape_) + kLine - 1) / kLine * kLine;
  scratch_.reset(new uint8_t[num_parts_ * scratch_bytes_ + kLine]);
  states_ = Floats(int64_t{2} * num_parts_ * shape_.group() * (shape_.value_dim + 2));
  state_head_.assign(2 * static_cast<size_t>(num_parts_), -1);
}

SoftmaxState HostJob::State(int part, int slot) const {
  const int64_t group = shape_.group();
  const int64_t o_size = group * shape_.value_dim;
  float* const begin = states_.get() + (2 * part + slot) * (o_size + 2 * group);
  return {begin, begin + o_size, begin + o_size + group};
}

// The segment that begins with `item` of the list and ends at `end` or where its head does.
HostJob::Segment HostJob::SegmentAt(int64_t item, int64_t end) const {
  const int64_t num_kv_heads = shape_.num_kv_heads;
  // The items of a row begin at row_ptr * G. Of rows that begin alike the last has the blocks.
  const auto next = std::upper_bound(row_ptr_.begin(), row_ptr_.end(), item / num_kv_heads);
  const int row = static_cast<int>(next - row_ptr_.begin()) - 1;
  const int64_t row_blocks = row_ptr_[row + 1] - row_ptr_[row];
  const int64_t in_row = item - row_ptr_[row] * num_kv_heads;
  const int head = static_cast<int>(in_row / row_blocks);
  const int64_t block = in_row % row_blocks;
  const int64_t count = std::min(row_blocks - block, end - item);
  const int64_t first = row_ptr_[row] + block;
  return {row, head, first, first + count, count == row_blocks};
}

void HostJob::WriteHead(int64_t head_index, const SoftmaxState& state) {
  const int64_t group = shape_.group();
  FinishState(shape_, state, o_.get() + head_index * group * shape_.value_dim,
              lse_.get() + head_index * group);
}

void HostJob::RunPart(int part) {
  const int64_t items = num_blocks() * shape_.num_kv_heads;
  const int64_t end = items * (part + 1) / num_parts_;
  const auto address = reinterpret_cast<uintptr_t>(scratch_.get());
  uint8_t* const scratch =
      scratch_.get() + (kLine - address % kLine) % kLine + part * scratch_bytes_;
  int slot = 0;
  for (int64_t item = items * part / num_parts_; item < end;) {
    const Segment segment = SegmentAt(item, end);
    const int64_t count = segment.last - segment.first;
    const int64_t q_head = HeadIndex(segment) * shape_.group();
    const SoftmaxState state = State(part, slot);
    ClearState(shape_, state);
    const HeadBlocks blocks{
        blocks_.data() + segment.first, static_cast<int>(count), segment.head * shape_.head_bytes(),
        selected_ ? selected_ + segment.first * (shape_.block / 32) : nullptr, prefetch_bytes_};
    kernel_.attend(head_shape_, q_.get() + q_head * shape_.key_dim, blocks, scratch, state);
    if (segment.whole) {
      WriteHead(HeadIndex(segment), state);
    } else {
      // Only the first and the last segment of a part can be cut, so two slots are enough.
      state_head_[2 * part + slot] = HeadIndex(segment);
      slot = 1;
    }
    item += count;
  }
}

void HostJob::Finish() {
  int64_t open_head = -1;
  SoftmaxState open{};
  for (int i = 0; i < 2 * num_parts_; ++i) {
    if (state_head_[i] < 0) continue;
    const SoftmaxState state = State(i / 2, i % 2);
    if (state_head_[i] == open_head) {
      MergeState(shape_, state, open);
      continue;
    }
    if (open_head >= 0) WriteHead(open_head, open);
    open_head = state_head_[i];
    open = state;
  }
  if (open_head >= 0) WriteHead(open_head, open);
}

std::shared_ptr<Task> MakeTask(const std::shared_ptr<HostJob>& job, int delay_ms) {
  const auto run = [job, delay_ms](int part) {
    if (part == 0 && delay_ms > 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms));
    }
    job->RunPart(part);
  };
  return std::make_shared<Task>(job->num_parts(), run, [job] { job->Finish(); });
}

}  // namespace wscope
