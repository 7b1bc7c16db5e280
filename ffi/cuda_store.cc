#include "cuda_store.h"

#include <algorithm>
#include <cstring>
#include <tuple>
#include <vector>

namespace wscope {
namespace {

using cuda::Check;

constexpr int64_t kBounceBytes = int64_t{16} << 20;  // Beyond that a copy gets no faster.

const cuda::Driver& Cu() { return *cuda::GetDriver(); }

}  // namespace

Status DeviceStore::MoveHome(const StagedStore& store) {
  const cuda::Scope scope(lane_->context_);
  Status status = scope.status();
  if (status.ok()) status = copied_.MakeWait(lane_->stores_.get());
  for (size_t first = 0; status.ok() && first < store.destinations.size();) {
    status = MoveSome(store, &first);
  }
  if (!status.ok()) {
    // Copies into the pools may be under way; nothing is stored hereafter, so the bounce buffer
    // may go along.
    using Memory =
        std::tuple<std::vector<StagedStore::Destination>, std::shared_ptr<cuda::DeviceBuffer>,
                   std::shared_ptr<cuda::PinnedBuffer>>;
    auto memory = std::make_shared<Memory>(store.destinations, buffer_, lane_->bounce_);
    if (!CudaLane::Settle(lane_->stores_.get(), std::move(memory))) buffer_ = nullptr;
  }
  return status;
}

Status DeviceStore::MoveSome(const StagedStore& store, size_t* first) {
  const int64_t bytes = store.block_bytes;
  const size_t begin = *first;
  size_t end = store.destinations.size();
  const auto bounces = [&](size_t i) { return !store.destinations[i].pool->is_pinned(); };
  bool any_bounces = false;
  for (size_t i = begin; i < end; ++i) any_bounces |= bounces(i);
  if (any_bounces) {
    if (Status made = MakeBounce(bytes); !made.ok()) return made;
    end = std::min(end, begin + static_cast<size_t>(lane_->bounce_->size() / bytes));
  }
  const auto bounced = [&](size_t i) { return lane_->bounce_->data() + (i - begin) * bytes; };
  for (size_t i = begin; i < end; ++i) {
    const StagedStore::Destination& to = store.destinations[i];
    uint8_t* const target = bounces(i) ? bounced(i) : to.pool->Block(to.layer, to.slot);
    if (Status status = CopyOut(to, target, i, bytes); !status.ok()) return status;
  }
  Status status = Check(Cu().StreamSynchronize(lane_->stores_.get()), "store");
  if (!status.ok()) return status;
  for (size_t i = begin; i < end; ++i) {
    const StagedStore::Destination& to = store.destinations[i];
    if (bounces(i)) std::memcpy(to.pool->Block(to.layer, to.slot), bounced(i), bytes);
  }
  *first = end;
  return status;
}

Status DeviceStore::CopyOut(const StagedStore::Destination& to, uint8_t* target, size_t block,
                            int64_t bytes) {
  for (int64_t done = 0; done < bytes;) {
    const int64_t left = bytes - done;
    const int64_t run =
        to.pool->is_pinned() ? to.pool->PinnedRun(to.slot * bytes + done, left) : left;
    const cuda::DevicePtr from = buffer_->data() + block * bytes + done;
    Status status =
        Check(Cu().MemcpyDtoHAsync(target + done, from, run, lane_->stores_.get()), "store");
    if (!status.ok()) return status;
    done += run;
  }
  return Status::Ok();
}

Status DeviceStore::MakeBounce(int64_t block_bytes) {
  if (lane_->bounce_ && lane_->bounce_->size() >= block_bytes) return Status::Ok();
  return cuda::PinnedBuffer::Make(std::max(kBounceBytes, block_bytes), &lane_->bounce_);
}

}  // namespace wscope
