#include "cuda_lane.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "clock.h"
#include "cuda_patience.h"

namespace wscope {
namespace {

using Lock = std::unique_lock<std::mutex>;
using cuda::Check;

constexpr int64_t kSettleNs = 10'000'000'000;  // What a failure waits for work under way.
constexpr int64_t kLastGraceNs = 200'000'000;  // What a lane waits that nobody has drained.

const cuda::Driver& Cu() { return *cuda::GetDriver(); }

cuda::Result QueryOf(const cuda::Event& event) { return event.Query(); }
cuda::Result QueryOf(const std::shared_ptr<cuda::Event>& event) { return event->Query(); }

template <typename... Things>
std::shared_ptr<void> Together(Things&&... things) {
  return std::make_shared<std::tuple<std::decay_t<Things>...>>(std::forward<Things>(things)...);
}

}  // namespace

Status CudaLane::Make(std::shared_ptr<CudaLane>* lane) {
  std::shared_ptr<CudaLane> made(new CudaLane);
  Status status =
      First({Check(Cu().CtxGetCurrent(&made->context_), "context"),
             Handshake::Make(&made->handshake_), made->loads_.Make(), made->stores_.Make()});
  if (!status.ok()) return status;
  made->results_ = std::make_shared<const ResultCarrier>();
  *lane = std::move(made);
  return status;
}

CudaLane::~CudaLane() {
  if (Drain(NowNs() + kLastGraceNs)) return;
  KeepForever(Together(std::move(handshake_), std::move(results_), std::move(pinned_),
                       std::move(device_), std::move(pump_), std::move(bounce_)));
}

int64_t CudaLane::Filling::took_ns() const {
  const int64_t since_freed = ended->Since(*freed);
  return before ? std::min(since_freed, ended->Since(*before)) : since_freed;
}

int64_t CudaLane::Filling::idle_ns() const {
  return before ? std::max<int64_t>(0, freed->Since(*before)) : 0;
}

bool CudaLane::Drain(int64_t deadline_ns) {
  if (handshake_ && !handshake_->Drain(deadline_ns)) return false;
  if (!Patience(deadline_ns).Await([&] { return stores_.Query(); })) return false;
  return EndLoads(deadline_ns) && Release(&pinned_, deadline_ns) && Release(&device_, deadline_ns);
}

bool CudaLane::EndLoads(int64_t deadline_ns) {
  if (!Patience(deadline_ns).Await([&] { return loads_.Query(); })) return false;
  Pump ended;  // Dies without the lock.
  const Lock lock(mutex_);
  std::swap(ended, pump_);
  return true;
}

// Frees what XLA's stream does not use any more.
template <typename All>
bool CudaLane::Release(All* returned, int64_t deadline_ns) {
  All taken;
  {
    const Lock lock(mutex_);
    taken.swap(*returned);
  }
  Patience patience(deadline_ns);
  while (!taken.empty() && patience.Await([&] { return QueryOf(taken.front().done); })) {
    taken.pop_front();
  }
  const Lock lock(mutex_);
  for (auto& left : taken) returned->push_back(std::move(left));
  return taken.empty();
}

bool CudaLane::Settle(cuda::Stream stream, std::shared_ptr<void> memory) {
  Patience patience(NowNs() + kSettleNs);
  const bool settled = patience.Await([&] { return Cu().StreamQuery(stream); });
  if (!settled) KeepForever(std::move(memory));
  return settled;
}

Status CudaLane::TakePinned(int64_t bytes, std::shared_ptr<cuda::PinnedBuffer>* buffer) {
  {
    const Lock lock(mutex_);
    const auto fits = std::find_if(pinned_.begin(), pinned_.end(),
                                   [&](const Staging& old) { return old.buffer->size() >= bytes; });
    // If the stream has not come to the oldest it has not to any.
    if (fits != pinned_.end() && fits->done->Done()) {
      *buffer = std::move(fits->buffer);
      pinned_.erase(fits);
      return Status::Ok();
    }
  }
  return cuda::PinnedBuffer::Make(bytes, buffer);
}

Status CudaLane::GivePinned(std::shared_ptr<cuda::PinnedBuffer> buffer, cuda::Stream stream) {
  Staging returned{std::move(buffer), TakeEvent()};
  if (Status status = returned.done->Record(stream); !status.ok()) return status;
  const Lock lock(mutex_);
  pinned_.push_back(std::move(returned));
  return Status::Ok();
}

Status CudaLane::TakeDevice(int64_t bytes, std::shared_ptr<cuda::DeviceBuffer>* buffer) {
  Returned<cuda::DeviceBuffer> too_small;  // Freed without the lock.
  {
    const Lock lock(mutex_);
    auto best = device_.end(), other = device_.end();
    for (auto old = device_.begin(); old != device_.end(); ++old) {
      if (!old->done.Done()) continue;
      const int64_t size = old->buffer->size();
      if (size < bytes) {
        other = old;
      } else if (best == device_.end() || size < best->buffer->size()) {
        best = old;
      }
    }
    if (best != device_.end()) {
      *buffer = std::move(best->buffer);
      device_.erase(best);
      return Status::Ok();
    }
    // A larger one takes its place, so there are never more than were in use at the same time.
    if (other != device_.end()) {
      too_small = std::move(*other);
      device_.erase(other);
    }
  }
  too_small.buffer.reset();
  return cuda::DeviceBuffer::Make(bytes, buffer);
}

void CudaLane::GiveDevice(std::shared_ptr<cuda::DeviceBuffer> buffer, cuda::Event done) {
  const Lock lock(mutex_);
  device_.push_back({std::move(buffer), std::move(done)});
}

}  // namespace wscope
