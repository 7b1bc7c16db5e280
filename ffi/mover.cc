#include "mover.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

namespace wscope {
namespace {

using Lock = std::unique_lock<std::mutex>;

// As many stores as prefill lets be under way: two layers, each for two readers of blocks.
constexpr size_t kMaxSpare = 4;

std::chrono::steady_clock::time_point At(int64_t deadline_ns) {
  return std::chrono::steady_clock::time_point(std::chrono::nanoseconds(deadline_ns));
}

Status Move(const StagedStore& store) {
  if (store.device) return store.device->MoveHome(store);
  const uint8_t* from = store.staging.bytes.get();
  for (const StagedStore::Destination& to : store.destinations) {
    std::memcpy(to.pool->Block(to.layer, to.slot), from, store.block_bytes);
    from += store.block_bytes;
  }
  return Status::Ok();
}

}  // namespace

Mover::Mover() : state_(std::make_shared<State>()) {
  thread_ = StartThread("wscope-mover", [state = state_] { Loop(*state); });
}

Mover::~Mover() {
  if (!creator_.IsThisProcess()) {
    thread_.detach();  // It does not exist here.
    return;
  }
  bool busy = false;
  {
    const Lock lock(state_->mutex);
    state_->leaving = true;
    busy = state_->completed < state_->enqueued;
    state_->changed.notify_all();
  }
  if (busy) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

void Mover::Loop(State& state) {
  Lock lock(state.mutex);
  for (;;) {
    state.changed.wait(lock, [&] { return !state.stores.empty() || state.leaving; });
    if (state.stores.empty()) return;
    StagedStore store = std::move(state.stores.front());
    state.stores.pop_front();
    const int delay_ms = state.delay_ms;
    lock.unlock();
    if (delay_ms > 0) std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms));
    Status moved = Move(store);
    const int64_t bytes = store.size();
    const int layer = bytes > 0 ? store.layer() : 0;
    StagingBuffer emptied = std::move(store.staging);
    store = {};  // Lets go of the pools, without the lock.
    std::deque<StagedStore> dropped;
    lock.lock();
    if (emptied.capacity > 0 && state.spare.size() < kMaxSpare) {
      state.spare.push_back(std::move(emptied));
    }
    if (bytes > 0 && --state.staged[layer] == 0) state.staged.erase(layer);
    state.staged_bytes -= bytes;
    if (moved.ok()) {
      ++state.completed;
    } else {
      state.failure = std::move(moved.text);
      state.interrupted = true;
      state.staged.clear();  // The others will never get home either.
      state.staged_bytes = 0;
      dropped.swap(state.stores);
    }
    state.changed.notify_all();
    if (dropped.empty()) continue;
    lock.unlock();  // They let go of pools, and of a device.
    dropped.clear();
    lock.lock();
  }
}

StagingBuffer Mover::TakeBuffer(int64_t num_bytes) {
  std::vector<StagingBuffer> unfit;  // Freed without the lock.
  StagingBuffer buffer;
  {
    const Lock lock(state_->mutex);
    std::vector<StagingBuffer>& spare = state_->spare;
    const auto fits = std::find_if(spare.begin(), spare.end(), [&](const StagingBuffer& kept) {
      return kept.capacity >= num_bytes && kept.capacity / 2 <= num_bytes;
    });
    if (fits != spare.end()) {
      buffer = std::move(*fits);
      spare.erase(fits);
    } else {
      unfit.swap(spare);  // Stores have another size now: prefill is over, or has begun.
    }
  }
  if (buffer.capacity == 0) {
    buffer.bytes.reset(new uint8_t[num_bytes]);
    buffer.capacity = num_bytes;
  }
  return buffer;
}

void Mover::Enqueue(StagedStore store) {
  const Lock lock(state_->mutex);
  if (state_->failure) return;
  if (store.size() > 0) {
    ++state_->staged[store.layer()];
    state_->staged_high_water =
        std::max(state_->staged_high_water, static_cast<int>(state_->staged.size()));
    state_->staged_bytes += store.size();
  }
  ++state_->enqueued;
  state_->stores.push_back(std::move(store));
  state_->changed.notify_all();
}

bool Mover::WaitCompleted(int64_t ticket, int64_t deadline_ns) {
  Lock lock(state_->mutex);
  const auto ended = [&] { return state_->completed >= ticket || state_->interrupted; };
  state_->changed.wait_until(lock, At(deadline_ns), ended);
  return state_->completed >= ticket;
}

void Mover::Interrupt() {
  const Lock lock(state_->mutex);
  state_->interrupted = true;
  state_->changed.notify_all();
}

bool Mover::Drain(int64_t deadline_ns) {
  Lock lock(state_->mutex);
  const int64_t all = state_->enqueued;
  return state_->changed.wait_until(lock, At(deadline_ns),
                                    [&] { return state_->completed >= all || state_->failure; });
}

std::optional<std::string> Mover::failure() const {
  const Lock lock(state_->mutex);
  return state_->failure;
}

int64_t Mover::completed() const {
  const Lock lock(state_->mutex);
  return state_->completed;
}

int Mover::staged_layers() const {
  const Lock lock(state_->mutex);
  return static_cast<int>(state_->staged.size());
}

int Mover::staged_high_water() const {
  const Lock lock(state_->mutex);
  return state_->staged_high_water;
}

int64_t Mover::staged_bytes() const {
  const Lock lock(state_->mutex);
  return state_->staged_bytes;
}

void Mover::set_delay_ms(int delay_ms) {
  const Lock lock(state_->mutex);
  state_->delay_ms = delay_ms;
}

}  // namespace wscope
