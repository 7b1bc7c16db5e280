#include "host_job.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <thread>
#include <utility>

#include "dispatch.h"

namespace wscope {
namespace {

// Of one part in the last two rounds, at least: a few times what it costs to take one, and to
// clear, write and merge a state. Of 75 to 311 MB of latent entries (15 workers) parts of twice the
// size make up to 0.02 less of reading, of two thirds to a third the same within noise. No cut is
// moved further to spare a state.
constexpr int64_t kLeastPartBytes = int64_t{128} << 10;
constexpr int64_t kLeastPartStates = 18;

constexpr int64_t kPieceBytes = 4096;  // Half a microsecond's, or who waits sees its flag late.

// What a worker may fetch before its turn. It has to be in the second-level cache then, which
// another thread of the core may share, so: a quarter of that. Half was no better on a Xeon.
int64_t NearBytes() {
  constexpr int64_t kLeast = int64_t{128} << 10;  // Where nobody knows the cache.
#ifdef _SC_LEVEL2_CACHE_SIZE
  static const int64_t bytes = std::max(int64_t{sysconf(_SC_LEVEL2_CACHE_SIZE)} / 4, kLeast);
  return bytes;
#else
  return kLeast;
#endif
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
  Cut(workers);
}

HostJob::HostJob(const AttentionShape& shape, std::shared_ptr<const RowBlocks> rows,
                 const uint32_t* selected, int workers)
    : shape_(shape),
      head_shape_(HeadOf(shape)),
      kernel_(KernelFor(head_shape_)),
      prefetch_bytes_(kOwnPrefetch),
      selected_(selected),
      rows_(std::move(rows)) {
  Cut(workers);
}

void HostJob::Cut(int workers) {
  const int64_t items = num_blocks() * shape_.num_kv_heads;
  if (items == 0) return;
  const auto each = static_cast<int>(std::min<int64_t>(workers, items));
  const int64_t least_bytes = std::max(kLeastPartBytes, kLeastPartStates * shape_.state_size() *
                                                            static_cast<int64_t>(sizeof(float)));
  const int64_t least = std::max<int64_t>(1, least_bytes / shape_.head_bytes());
  int rounds = 1;
  while (rounds < kMaxRounds && (items >> rounds) >= least * each) ++rounds;
  num_parts_ = rounds * each;
  for (int round = 0; round < rounds; ++round) {
    const int64_t left = items >> round;
    const int64_t after = round + 1 == rounds ? 0 : items >> (round + 1);
    const int64_t near = std::min(least, (left - after) / each / 4);
    for (int i = 0; i < each; ++i) {
      part_begins_.push_back(CutNear(items - left + (left - after) * i / each, near));
    }
  }
  part_begins_.push_back(items);
  half_kept_.reset(new std::atomic<bool>[num_parts_]());
  // A part that finds no memory can only make the result void; here it is an error that is told,
  // for the first of the open jobs.
  SpareBuffers::Get().Reserve(kept_bytes());
}

int64_t HostJob::CutNear(int64_t item, int64_t most) const {
  const Segment segment = SegmentAt(item, num_blocks() * shape_.num_kv_heads);
  const int64_t begin = HeadBegin(segment), end = item + segment.last - segment.first;
  if (item - begin <= most) return begin;
  return end - item <= most ? end : item;
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
  own_.reset(new uint8_t[results + q_bytes]);
  auto* const o = reinterpret_cast<float*>(own_.get());
  std::memcpy(own_.get() + results, q, q_bytes);
  Bind(own_.get() + results, q_storage, o, o + o_size());
}

int64_t HostJob::HeadBegin(const Segment& segment) const {
  const std::vector<int64_t>& row_ptr = rows_->row_ptr;
  const int64_t row_blocks = row_ptr[segment.row + 1] - row_ptr[segment.row];
  return row_ptr[segment.row] * shape_.num_kv_heads + segment.head * row_blocks;
}

float* HostJob::Kept(int part, bool begins_earlier) {
  std::call_once(kept_once_, [&] { kept_ = SpareBuffers::Get().Take(kept_bytes()); });
  auto* const memory = reinterpret_cast<float*>(kept_.memory.get());
  return memory == nullptr ? nullptr
                           : memory + (2 * part + (begins_earlier ? 0 : 1)) * shape_.state_size();
}

int HostJob::PartOf(int64_t item) const {
  const auto next = std::upper_bound(part_begins_.begin(), part_begins_.end(), item);
  return static_cast<int>(next - part_begins_.begin()) - 1;
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

void HostJob::RunPart(int part) {
  const int64_t kernel_bytes = WholeLines(kernel_.scratch_bytes(head_shape_));
  const int64_t q_size = int64_t{shape_.group()} * shape_.key_dim;
  uint8_t* const scratch =
      ThreadMemory(kernel_bytes + (q_size + shape_.state_size()) * sizeof(float));
  if (scratch == nullptr) {
    is_void_ = true;
    return;
  }
  auto* const q_scratch = reinterpret_cast<float*>(scratch + kernel_bytes);
  bool follows = false;
  for (int64_t item = part_begins_[part], end = part_begins_[part + 1]; item < end;) {
    const Segment segment = SegmentAt(item, end);
    const int64_t head = HeadIndex(segment), count = segment.last - segment.first;
    item += count;
    const bool begins_earlier = HeadBegin(segment) < part_begins_[part];
    float* const memory = segment.whole ? q_scratch + q_size : Kept(part, begins_earlier);
    if (memory == nullptr) {
      is_void_ = true;
      return;
    }
    const SoftmaxState state = StateAt(shape_, memory);
    ClearState(head_shape_, state);
    const HeadBlocks blocks{rows_->blocks.data() + segment.first,
                            static_cast<int>(count),
                            layer_offset_ + segment.head * shape_.head_bytes(),
                            selected_ ? selected_ + segment.first * (shape_.block / 32) : nullptr,
                            prefetch_bytes_,
                            item < end ? HeadAt(SegmentAt(item, end)) : nullptr,
                            follows};
    follows = true;
    kernel_.attend(head_shape_, Queries(head, q_scratch), blocks, scratch, state);
    if (segment.whole) {
      WriteHead(head, state);
    } else {
      MergeHead(segment, part);
    }
  }
}

HostJob::Bytes HostJob::Near(int part, int step) const {
  if (part >= num_parts_ || step * kPieceBytes >= NearBytes()) return {nullptr, 0};
  const int64_t head_bytes = shape_.head_bytes(), end = part_begins_[part + 1];
  const int64_t pieces = (head_bytes + kPieceBytes - 1) / kPieceBytes;  // Of a head.
  const int64_t item = part_begins_[part] + step / pieces, in_head = step % pieces * kPieceBytes;
  if (item >= end) return {nullptr, 0};
  return {HeadAt(SegmentAt(item, end)) + in_head, std::min(kPieceBytes, head_bytes - in_head)};
}

void HostJob::MergeHead(const Segment& segment, int part) {
  const int64_t begin = HeadBegin(segment);
  const int64_t end = begin + rows_->row_ptr[segment.row + 1] - rows_->row_ptr[segment.row];
  const int first = PartOf(begin), count = PartOf(end - 1) - first + 1;
  const auto state = [&](int i) { return StateAt(shape_, Kept(first + i, i > 0)); };
  int at = part - first;
  for (int step = 1; step < count; step *= 2) {
    const int left = at / (2 * step) * (2 * step), right = left + step;
    if (right >= count) continue;
    // The first of the two to come leaves the pair to the other.
    if (!half_kept_[first + right].exchange(true, std::memory_order_acq_rel)) return;
    MergeState(shape_, state(right), state(left));
    at = left;
  }
  WriteHead(HeadIndex(segment), state(0));
}

void HostJob::Finish() {
  if (is_void_) {
    Void();
  } else {
    Forget();
  }
}

void HostJob::Void() {
  std::fill_n(lse_, lse_size(), std::numeric_limits<float>::quiet_NaN());
  Forget();
}

// The jobs of a whole step may be held until the device has passed them.
void HostJob::Forget() { SpareBuffers::Get().Give(std::move(kept_)); }

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
  const auto approach = [job](int part, int step) {
    const HostJob::Bytes near = job->Near(part, step);
    for (int64_t line = 0; line < near.count; line += 64) {
      __builtin_prefetch(near.begin + line, 0, 2);  // Into the second level.
    }
    return near.count > 0;
  };
  return std::make_shared<Task>(job->num_parts(), run, finish, drop, approach);
}

}  // namespace wscope
