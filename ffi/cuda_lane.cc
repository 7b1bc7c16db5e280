#include "cuda_lane.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "clock.h"

namespace wscope {
namespace {

using Lock = std::unique_lock<std::mutex>;
using cuda::Address;
using cuda::Check;

constexpr int64_t kBounceBytes = int64_t{16} << 20;  // Beyond that a copy gets no faster.
constexpr size_t kMaxDeviceBuffers = 4;              // As the mover keeps of its own.

const cuda::Driver& Cu() { return *cuda::GetDriver(); }

int64_t ItemSize(Storage storage) { return ItemBytes(storage); }

// Runs a task that no worker takes any more: the process is ending.
void RunHere(const CudaJob& held) {
  for (int part = 0; part < held.job->num_parts(); ++part) held.job->RunPart(part);
  held.job->Finish();
}

// Callbacks of the driver, which may not call it.
void SubmitJob(void* data) {
  auto* const held = static_cast<CudaJob*>(data);
  CopyToFloat(held->q(), held->q_storage, held->job->q_size(), held->job->q());
  if (!Workers::Get().Submit(held->task)) {
    RunHere(*held);
    held->task = nullptr;
  }
}

void CollectJob(void* data) {
  auto* const held = static_cast<CudaJob*>(data);
  if (held->task) held->task->Wait();
  std::memcpy(held->o(), held->job->o(), held->job->o_size() * sizeof(float));
  std::memcpy(held->lse(), held->job->lse(), held->job->lse_size() * sizeof(float));
}

// Whole blocks of a store that lie one after the other on both sides.
template <typename Copy>
Status ForEachRun(const std::vector<Plan::Move>& moves, const Copy& copy) {
  for (size_t first = 0; first < moves.size();) {
    size_t end = first + 1;
    while (end < moves.size() && moves[end].block == moves[end - 1].block + 1) ++end;
    if (Status status = copy(moves[first].block, first, end - first); !status.ok()) return status;
    first = end;
  }
  return Status::Ok();
}

}  // namespace

// Blocks in device memory of ours, copied there behind XLA's work.
class DeviceStore : public DeviceStaging {
 public:
  DeviceStore(std::shared_ptr<CudaLane> lane, std::shared_ptr<cuda::DeviceBuffer> buffer)
      : lane_(std::move(lane)), buffer_(std::move(buffer)) {}
  ~DeviceStore() override { lane_->GiveDevice(std::move(buffer_)); }

  Status MoveHome(const StagedStore& store) override {
    const cuda::Scope scope(lane_->context_);
    Status status = First({scope.status(), copied.MakeWait(lane_->stores_.get())});
    for (size_t first = 0; status.ok() && first < store.destinations.size();) {
      status = MoveSome(store, &first);
    }
    return status;
  }

  cuda::Event copied;

 private:
  // As many blocks as the bounce buffer takes; those of a pinned pool need none.
  Status MoveSome(const StagedStore& store, size_t* first) {
    const int64_t bytes = store.block_bytes;
    const cuda::Stream stream = lane_->stores_.get();
    if (!lane_->bounce_ || lane_->bounce_->size() < bytes) {
      Status made = cuda::PinnedBuffer::Make(std::max(kBounceBytes, bytes), &lane_->bounce_);
      if (!made.ok()) return made;
    }
    const size_t begin = *first;
    const size_t end = std::min(store.destinations.size(), begin + lane_->bounce_->size() / bytes);
    for (size_t i = begin; i < end; ++i) {
      const StagedStore::Destination& to = store.destinations[i];
      uint8_t* const target = to.pool->is_pinned() ? to.pool->Block(to.layer, to.slot)
                                                   : lane_->bounce_->data() + (i - begin) * bytes;
      Status status = CopyOut(target, buffer_->data() + i * bytes, bytes,
                              to.pool->is_pinned() ? to.pool.get() : nullptr, to, stream);
      if (!status.ok()) return status;
    }
    if (Status status = Check(Cu().StreamSynchronize(stream), "store"); !status.ok()) return status;
    for (size_t i = begin; i < end; ++i) {
      const StagedStore::Destination& to = store.destinations[i];
      if (to.pool->is_pinned()) continue;
      std::memcpy(to.pool->Block(to.layer, to.slot), lane_->bounce_->data() + (i - begin) * bytes,
                  bytes);
    }
    *first = end;
    return Status::Ok();
  }

  static Status CopyOut(uint8_t* to, cuda::DevicePtr from, int64_t bytes, const Pool* pinned,
                        const StagedStore::Destination& slot, cuda::Stream stream) {
    for (int64_t done = 0; done < bytes;) {
      const int64_t run =
          pinned ? pinned->PinnedRun(slot.slot * bytes + done, bytes - done) : bytes - done;
      Status status = Check(Cu().MemcpyDtoHAsync(to + done, from + done, run, stream), "store");
      if (!status.ok()) return status;
      done += run;
    }
    return Status::Ok();
  }

  const std::shared_ptr<CudaLane> lane_;
  std::shared_ptr<cuda::DeviceBuffer> buffer_;
};

Status CudaLane::Make(std::shared_ptr<CudaLane>* lane) {
  std::shared_ptr<CudaLane> made(new CudaLane);
  Status status = First({Check(Cu().CtxGetCurrent(&made->context_), "context"), made->calls_.Make(),
                         made->loads_.Make(), made->stores_.Make()});
  if (status.ok()) *lane = std::move(made);
  return status;
}

CudaLane::~CudaLane() {
  const cuda::Scope scope(context_);
  // What hangs beyond every deadline keeps what it may still touch, for ever.
  if (!Idle()) new std::deque<std::shared_ptr<CudaJob>>(std::move(called_));
  called_.clear();
  pinned_.clear();
  device_.clear();
  bounce_ = nullptr;
}

bool CudaLane::Drain(int64_t deadline_ns) {
  const cuda::Scope scope(context_);
  while (!Idle()) {
    if (NowNs() > deadline_ns) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const Lock lock(mutex_);
  pump_ = {};
  return true;
}

Status CudaLane::Call(void (*function)(void*), const std::shared_ptr<CudaJob>& job) {
  Status status = Check(Cu().LaunchHostFunc(calls_.get(), function, job.get()), "host callback");
  if (!status.ok()) return status;
  status = job->called.Record(calls_.get());
  const Lock lock(mutex_);
  while (!called_.empty() && called_.front()->called.Done()) called_.pop_front();
  called_.push_back(job);
  return status;
}

Status CudaLane::TakePinned(int64_t bytes, std::shared_ptr<cuda::PinnedBuffer>* buffer) {
  {
    const Lock lock(mutex_);
    const auto fits = std::find_if(pinned_.begin(), pinned_.end(), [&](const Returned& old) {
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
  Returned returned{std::move(buffer), {}};
  if (Status status = returned.done.Record(stream); !status.ok()) return status;
  const Lock lock(mutex_);
  pinned_.push_back(std::move(returned));
  return Status::Ok();
}

Status CudaLane::TakeDevice(int64_t bytes, std::shared_ptr<cuda::DeviceBuffer>* buffer) {
  {
    const Lock lock(mutex_);
    const auto fits = std::find_if(device_.begin(), device_.end(), [&](const auto& old) {
      return old->size() >= bytes && old->size() / 2 <= bytes;
    });
    if (fits != device_.end()) {
      *buffer = std::move(*fits);
      device_.erase(fits);
      return Status::Ok();
    }
    device_.clear();  // Stores have another size now.
  }
  return cuda::DeviceBuffer::Make(bytes, buffer);
}

void CudaLane::GiveDevice(std::shared_ptr<cuda::DeviceBuffer> buffer) {
  const Lock lock(mutex_);
  if (device_.size() < kMaxDeviceBuffers) device_.push_back(std::move(buffer));
}

Status OnStream::Start(const void* q, Storage q_storage, int job_delay_ms, OpenJob* open) {
  auto held = std::make_shared<CudaJob>();
  held->job = open->job;
  held->q_storage = q_storage;
  if (open->job->num_parts() > 0) {
    held->task = MakeTask(open->job, job_delay_ms);
    const int64_t q_bytes = open->job->q_size() * ItemSize(q_storage);
    const int64_t results = (open->job->o_size() + open->job->lse_size()) * sizeof(float);
    Status status = lane_->TakePinned(results + q_bytes, &held->staging);
    if (!status.ok()) return status;
    // On XLA's stream: q may be overwritten before the job has ended.
    status = First({Check(Cu().MemcpyDtoHAsync(held->q(), Address(q), q_bytes, stream_), "q"),
                    held->started.Record(stream_), held->started.MakeWait(lane_->calls_.get())});
    if (status.ok()) status = lane_->Call(&SubmitJob, held);
    if (!status.ok()) return status;
  } else if (Status status = held->started.Record(stream_); !status.ok()) {
    return status;
  }
  open->task = held->task;
  open->cuda = std::move(held);
  return Status::Ok();
}

Status OnStream::Finish(OpenJob open, float* o, float* lse, TimingSource* timing) {
  struct Marks {
    cuda::Event entered, waited;
  };
  const std::shared_ptr<CudaJob> held = open.cuda;
  const auto marks = std::make_shared<Marks>();
  Status status = marks->entered.Record(stream_);
  const int64_t o_size = held->job->o_size();
  const int64_t lse_size = held->job->lse_size();
  if (!status.ok()) return status;
  if (held->staging == nullptr) {  // Zeros and minus infinity.
    status = First({Check(Cu().MemsetD32Async(Address(o), 0, o_size, stream_), "o"),
                    Check(Cu().MemsetD32Async(Address(lse), 0xff800000u, lse_size, stream_), "lse"),
                    marks->waited.Record(stream_)});
  } else {
    status = lane_->Call(&CollectJob, held);
    if (status.ok()) status = held->called.MakeWait(stream_);
    if (!status.ok()) return status;
    status = First(
        {marks->waited.Record(stream_),
         Check(Cu().MemcpyHtoDAsync(Address(o), held->o(), o_size * sizeof(float), stream_), "o"),
         Check(Cu().MemcpyHtoDAsync(Address(lse), held->lse(), lse_size * sizeof(float), stream_),
               "lse"),
         lane_->GivePinned(held->staging, stream_)});
  }
  if (!status.ok()) return status;
  *timing = [held, marks, task = open.task]() -> std::optional<StepTiming> {
    if (!marks->waited.Done()) return std::nullopt;
    StepTiming took;
    if (task && task->done()) {
      const int64_t device_ns = marks->entered.Since(held->started);
      took.cpu_ns = task->end_ns() - task->start_ns();
      took.wait_cpu_ns = marks->waited.Since(marks->entered);
      took.wait_link_ns = std::max<int64_t>(0, device_ns - took.cpu_ns);
    }
    return took;
  };
  return Status::Ok();
}

Status OnStream::Fill(const LoadCall& call, const Plan::Load& load, size_t number) {
  CudaLane::Pump& pump = lane_->pump_;
  const cuda::Stream stream = lane_->loads_.get();
  const int64_t bytes = load.num_slots * call.block_bytes;
  auto filling = std::make_shared<CudaLane::Filling>();
  Status status = First({pump.freed.MakeWait(stream), filling->began.Record(stream)});
  for (int64_t done = 0; status.ok() && done < bytes;) {
    const uint8_t* const from = call.pool->Block(load.layer, load.first_slot) + done;
    const int64_t run =
        call.pool->PinnedRun(load.first_slot * call.block_bytes + done, bytes - done);
    const cuda::DevicePtr to = Address(call.Slot(number)) + done;
    status = Check(Cu().MemcpyHtoDAsync(to, from, run, stream), "load");
    done += run;
  }
  if (status.ok()) status = filling->ended.Record(stream);
  pump.filled[number % 2] = std::move(filling);
  return status;
}

Status OnStream::Load(const LoadCall& call, TimingSource* timing) {
  const Lock lock(lane_->mutex_);
  CudaLane::Pump& pump = lane_->pump_;
  if (call.turn > 0 && pump.slots != call.slots) {
    return Status::Internal(
        "load: the PING-PONG slots have moved within a step, and a copy into them is under way; "
        "the program must pass them on in place");
  }
  pump.slots = call.slots;
  pump.pool = call.pool;
  // The attention over the chunk before, which this call comes behind, has read its slot.
  Status status = pump.freed.Record(stream_);
  if (status.ok() && call.turn == 0) status = Fill(call, call.now, 0);
  if (status.ok() && call.next) status = Fill(call, *call.next, call.turn + 1);
  if (!status.ok()) return status;
  const std::shared_ptr<CudaLane::Filling> filled = pump.filled[call.turn % 2];
  if (call.now.num_slots > 0) {
    *timing = [filled]() -> std::optional<StepTiming> {
      if (!filled->ended.Done()) return std::nullopt;
      StepTiming took;
      took.link_ns = filled->ended.Since(filled->began);
      return took;
    };
  }
  return filled->ended.MakeWait(stream_);
}

Status OnStream::Store(const uint8_t* blocks, const std::vector<Plan::Move>& moves, Mover&,
                       StagedStore* staged) {
  const int64_t bytes = staged->block_bytes;
  std::shared_ptr<cuda::DeviceBuffer> buffer;
  Status status = lane_->TakeDevice(bytes * static_cast<int64_t>(moves.size()), &buffer);
  if (!status.ok()) {
    status.text = "store: no room on the GPU for the blocks on their way out (" + status.text +
                  "); give JAX less of its memory (XLA_PYTHON_CLIENT_MEM_FRACTION)";
    return status;
  }
  status = ForEachRun(moves, [&](int64_t block, size_t first, size_t count) {
    return Check(Cu().MemcpyDtoDAsync(buffer->data() + first * bytes,
                                      Address(blocks) + block * bytes, count * bytes, stream_),
                 "store");
  });
  auto device = std::make_unique<DeviceStore>(lane_, std::move(buffer));
  if (status.ok()) status = device->copied.Record(stream_);
  if (status.ok()) staged->device = std::move(device);
  return status;
}

}  // namespace wscope
