#include "host_job.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <thread>
#include <utility>

#include "dispatch.h"

namespace wscope {
namespace {

constexpr int64_t kLine = 64;  // What kernels want their scratch aligned to.
constexpr int kMaxRounds = 4;
// Of one part in the last two rounds, at least: a few times what it costs to take one.
constexpr int64_t kLeastPartBytes = int64_t{128} << 10;

int64_t Lines(int64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

// Not cleared: every byte is written before it is read.
std::unique_ptr<uint8_t[]> Bytes(int64_t count) {
  return std::unique_ptr<uint8_t[]>(new uint8_t[count]);
}

}  // namespace

RowBlocks::RowBlocks(const Pool* pool, int num_rows, const int32_t* row_ptr, const int32_t* table) {
  this->row_ptr.reserve(num_rows + 1);
  for (int row = 0; row <= num_rows; ++row) this->row_ptr.push_back(row_ptr[row] - row_ptr[0]);
  blocks.reserve(this->row_ptr.back());
  for (int32_t at = row_ptr[0]; at < row_ptr[num_rows]; ++at) {
    blocks.push_back(pool->Block(0, table[at]));
  }
}

HostJob::HostJob(const AttentionShape& shape, std::shared_ptr<Pool> pool, int layer,
                 std::shared_ptr<const RowBlocks> rows, int workers, const KernelChoice& choice)
    : shape_(shape),
      head_shape_(HeadOf(shape)),
      kernel_(choice.kernel ? *choice.kernel : KernelFor(head_shape_)),
      prefetch_bytes_(choice.prefetch_bytes),
      pool_(std::move(pool)),
      rows_(std::move(rows)),
      layer_offset_(pool_ ? pool_->Block(layer, 0) - pool_->Block(0, 0) : 0) {
  Allocate(workers);
}

HostJob::HostJob(const AttentionShape& shape, std::shared_ptr<const RowBlocks> rows,
                 const uint32_t* selected, int workers)
    : shape_(shape),
      head_shape_(HeadOf(shape)),
      kernel_(KernelFor(head_shape_)),
      prefetch_bytes_(kOwnPrefetch),
      selected_(selected),
      rows_(std::move(rows)) {
  Allocate(workers);
}

void HostJob::Allocate(int workers) {
  const int64_t items = num_blocks() * shape_.num_kv_heads;
  if (items > 0) {
    parts_per_round_ = static_cast<int>(std::min<int64_t>(workers, items));
    const int64_t part_items = std::max<int64_t>(1, kLeastPartBytes / shape_.head_bytes());
    rounds_ = 1;
    while (rounds_ < kMaxRounds && (items >> rounds_) >= part_items * parts_per_round_) ++rounds_;
  }
  num_parts_ = rounds_ * parts_per_round_;
  const int64_t group = shape_.group();
  kernel_bytes_ = Lines(kernel_.scratch_bytes(head_shape_));
  scratch_bytes_ = kernel_bytes_ + Lines(group * shape_.key_dim * sizeof(float));
  scratch_ = Bytes(num_parts_ * scratch_bytes_ + kLine);
  states_.reset(new float[int64_t{2} * num_parts_ * group * (shape_.value_dim + 2)]);
  state_head_.assign(2 * static_cast<size_t>(num_parts_), -1);
}

void HostJob::Bind(const void* q, Storage q_storage, float* o, float* lse) {
  q_ = q;
  q_storage_ = q_storage;
  o_ = o;
  lse_ = lse;
  const int64_t heads = shape_.num_q_heads;
  for (int row = 0; row < num_rows(); ++row) {
    if (rows_->row_ptr[row] != rows_->row_ptr[row + 1]) continue;
    std::fill_n(o_ + row * heads * shape_.value_dim, heads * shape_.value_dim, 0.0f);
    std::fill_n(lse_ + row * heads, heads, -std::numeric_limits<float>::infinity());
  }
}

void HostJob::BindCopy(const void* q, Storage q_storage) {
  const int64_t q_bytes = q_size() * ItemBytes(q_storage);
  const int64_t results = (o_size() + lse_size()) * static_cast<int64_t>(sizeof(float));
  own_ = Bytes(results + q_bytes);
  auto* const o = reinterpret_cast<float*>(own_.get());
  std::memcpy(own_.get() + results, q, q_bytes);
  Bind(own_.get() + results, q_storage, o, o + o_size());
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
  const std::vector<int64_t>& row_ptr = rows_->row_ptr;
  // The items of a row begin at row_ptr * G. Of rows that begin alike the last has the blocks.
  const auto next = std::upper_bound(row_ptr.begin(), row_ptr.end(), item / num_kv_heads);
  const int row = static_cast<int>(next - row_ptr.begin()) - 1;
  const int64_t row_blocks = row_ptr[row + 1] - row_ptr[row];
  const int64_t in_row = item - row_ptr[row] * num_kv_heads;
  const int head = static_cast<int>(in_row / row_blocks);
  const int64_t block = in_row % row_blocks;
  const int64_t count = std::min(row_blocks - block, end - item);
  const int64_t first = row_ptr[row] + block;
  return {row, head, first, first + count, count == row_blocks};
}

const float* HostJob::Queries(int64_t head_index, float* scratch) const {
  const int64_t count = int64_t{shape_.group()} * shape_.key_dim;
  const auto* const from =
      static_cast<const uint8_t*>(q_) + head_index * count * ItemBytes(q_storage_);
  if (q_storage_ == Storage::kFloat32) return reinterpret_cast<const float*>(from);
  CopyToFloat(from, q_storage_, count, scratch);
  return scratch;
}

void HostJob::WriteHead(int64_t head_index, const SoftmaxState& state) {
  const int64_t group = shape_.group();
  FinishState(shape_, state, o_ + head_index * group * shape_.value_dim, lse_ + head_index * group);
}

int64_t HostJob::PartBegin(int part) const {
  const int64_t items = num_blocks() * shape_.num_kv_heads;
  const int round = part / parts_per_round_;
  if (round == rounds_) return items;
  const int64_t left = items >> round;
  const int64_t after = round + 1 == rounds_ ? 0 : items >> (round + 1);
  return items - left + (left - after) * (part % parts_per_round_) / parts_per_round_;
}

void HostJob::RunPart(int part) {
  const int64_t end = PartBegin(part + 1);
  const auto address = reinterpret_cast<uintptr_t>(scratch_.get());
  uint8_t* const scratch =
      scratch_.get() + (kLine - address % kLine) % kLine + part * scratch_bytes_;
  auto* const q_scratch = reinterpret_cast<float*>(scratch + kernel_bytes_);
  int slot = 0;
  for (int64_t item = PartBegin(part); item < end;) {
    const Segment segment = SegmentAt(item, end);
    const int64_t count = segment.last - segment.first;
    const float* const q = Queries(HeadIndex(segment), q_scratch);
    const SoftmaxState state = State(part, slot);
    ClearState(shape_, state);
    const HeadBlocks blocks{rows_->blocks.data() + segment.first, static_cast<int>(count),
                            layer_offset_ + segment.head * shape_.head_bytes(),
                            selected_ ? selected_ + segment.first * (shape_.block / 32) : nullptr,
                            prefetch_bytes_};
    kernel_.attend(head_shape_, q, blocks, scratch, state);
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
  Forget();
}

void HostJob::Void() {
  std::fill_n(lse_, lse_size(), std::numeric_limits<float>::quiet_NaN());
  Forget();
}

// The jobs of a whole step may be held until the device has passed them.
void HostJob::Forget() {
  scratch_.reset();
  states_.reset();
}

std::shared_ptr<Task> MakeTask(const std::shared_ptr<HostJob>& job, int delay_ms,
                               const std::function<void()>& ended) {
  const auto run = [job, delay_ms](int part) {
    if (part == 0 && delay_ms > 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms));
    }
    job->RunPart(part);
  };
  const auto finish = [job, ended] {
    job->Finish();
    if (ended) ended();
  };
  const auto drop = [job, ended] {
    job->Void();
    if (ended) ended();
  };
  return std::make_shared<Task>(job->num_parts(), run, finish, drop);
}

}  // namespace wscope
