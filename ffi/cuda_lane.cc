#include "cuda_lane.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <tuple>
#include <utility>

#include "clock.h"

namespace wscope {
namespace {

using Lock = std::unique_lock<std::mutex>;
using cuda::Check;

constexpr int kFailingQueries = 50;            // Then the context is lost, and nothing runs in it.
constexpr int64_t kSettleNs = 10'000'000'000;  // What a failure waits for work under way.
constexpr int64_t kLastGraceNs = 200'000'000;  // What a lane waits that nobody has drained.

const cuda::Driver& Cu() { return *cuda::GetDriver(); }

// Waits for one thing after the other by polling, since no wait of the driver has a deadline.
class Patience {
 public:
  explicit Patience(int64_t deadline_ns) : deadline_ns_(deadline_ns) {}

  // False if the deadline passed first.
  template <typename Query>
  bool Await(const Query& query) {
    for (;;) {
      const cuda::Result result = query();
      if (result == 0) return true;
      if (result != cuda::kNotReady && ++failures_ >= kFailingQueries) return true;
      if (NowNs() > deadline_ns_) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

 private:
  const int64_t deadline_ns_;
  int failures_ = 0;
};

// For what the device may still touch, since it hangs beyond every deadline.
void KeepForever(std::shared_ptr<void> memory) {
  static std::mutex mutex;
  static auto* const kept = new std::deque<std::shared_ptr<void>>;
  const Lock lock(mutex);
  kept->push_back(std::move(memory));
}

template <typename... Things>
std::shared_ptr<void> Together(Things&&... things) {
  return std::make_shared<std::tuple<std::decay_t<Things>...>>(std::forward<Things>(things)...);
}

}  // namespace

Status CudaLane::Make(std::shared_ptr<CudaLane>* lane) {
  std::shared_ptr<CudaLane> made(new CudaLane);
  Status status = First({Check(Cu().CtxGetCurrent(&made->context_), "context"), made->calls_.Make(),
                         made->loads_[0].Make(), made->loads_[1].Make(), made->stores_.Make()});
  if (status.ok()) *lane = std::move(made);
  return status;
}

CudaLane::~CudaLane() {
  if (Drain(NowNs() + kLastGraceNs)) return;
  KeepForever(Together(std::move(called_), std::move(pinned_), std::move(device_), std::move(pump_),
                       std::move(bounce_)));
}

bool CudaLane::Drain(int64_t deadline_ns) {
  Patience patience(deadline_ns);
  for (const cuda::OwnStream* stream : {&calls_, &stores_}) {
    if (!patience.Await([&] { return stream->Query(); })) return false;
  }
  if (!EndLoads(deadline_ns)) return false;
  std::deque<std::shared_ptr<CudaJob>> called;  // Dies without the lock.
  {
    const Lock lock(mutex_);
    called.swap(called_);
  }
  return Release(&pinned_, deadline_ns) && Release(&device_, deadline_ns);
}

bool CudaLane::EndLoads(int64_t deadline_ns) {
  Patience patience(deadline_ns);
  for (const cuda::OwnStream& stream : loads_) {
    if (!patience.Await([&] { return stream.Query(); })) return false;
  }
  Pump ended;  // Dies without the lock.
  const Lock lock(mutex_);
  std::swap(ended, pump_);
  return true;
}

// Frees what XLA's stream does not use any more.
template <typename Buffer>
bool CudaLane::Release(AllReturned<Buffer>* returned, int64_t deadline_ns) {
  AllReturned<Buffer> taken;
  {
    const Lock lock(mutex_);
    taken.swap(*returned);
  }
  Patience patience(deadline_ns);
  while (!taken.empty() && patience.Await([&] { return taken.front().done.Query(); })) {
    taken.pop_front();
  }
  const Lock lock(mutex_);
  for (Returned<Buffer>& left : taken) returned->push_back(std::move(left));
  return taken.empty();
}

void CudaLane::Settle(cuda::Stream stream, std::shared_ptr<void> memory) {
  Patience patience(NowNs() + kSettleNs);
  if (!patience.Await([&] { return Cu().StreamQuery(stream); })) KeepForever(std::move(memory));
}

Status CudaLane::Call(void (*function)(void*), const std::shared_ptr<CudaJob>& job) {
  Status status;
  {
    const Lock lock(mutex_);
    while (!called_.empty() && called_.front()->called.Done()) called_.pop_front();
    status = Check(Cu().LaunchHostFunc(calls_.get(), function, job.get()), "host callback");
    if (status.ok()) status = job->called.Record(calls_.get());
    if (status.ok()) called_.push_back(job);
  }
  if (!status.ok()) Settle(calls_.get(), job);
  return status;
}

Status CudaLane::TakePinned(int64_t bytes, std::shared_ptr<cuda::PinnedBuffer>* buffer) {
  {
    const Lock lock(mutex_);
    const auto fits = std::find_if(pinned_.begin(), pinned_.end(), [&](const auto& old) {
      return old.buffer->size() >= bytes && old.done.Done();
    });
    if (fits != pinned_.end()) {
      *buffer = std::move(fits->buffer);
      pinned_.erase(fits);
      return Status::Ok();
    }
  }
  return cuda::PinnedBuffer::Make(bytes, buffer);
}

Status CudaLane::GivePinned(std::shared_ptr<cuda::PinnedBuffer> buffer, cuda::Stream stream) {
  Returned<cuda::PinnedBuffer> returned{std::move(buffer), {}};
  if (Status status = returned.done.Record(stream); !status.ok()) return status;
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
