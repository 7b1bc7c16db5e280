// What Python holds: pools and step queues with their numbers.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "clock.h"
#include "cuda_driver.h"
#include "plan.h"
#include "pool.h"
#include "step_queue.h"

namespace nb = nanobind;

namespace wscope {

inline constexpr int64_t kCloseNs =
    30'000'000'000;                          // How long close() waits for what is under way.
inline constexpr double kMaxTimeoutS = 1e6;  // Keeps the deadline inside 64 bits.

using Int32Vector = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Int32Matrix = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <int kColumns>
using Int32Table =
    nb::ndarray<const int32_t, nb::shape<-1, kColumns>, nb::c_contig, nb::device::cpu>;

template <typename Array>
PlanArrays::Table Borrow(const Array& array) {
  return {array.data(), static_cast<int64_t>(array.shape(0))};
}

// A pool and its number. The memory lives on in plans, stores and views.
class PoolHandle {
 public:
  PoolHandle(int num_layers, int max_slots, int64_t block_bytes, std::optional<int> device)
      : pool_(std::make_shared<Pool>(num_layers, max_slots, block_bytes,
                                     device ? cuda::MakePageLock(*device) : nullptr)),
        device_(device),
        id_(Pools().Add(pool_)) {}
  ~PoolHandle() { Close(); }
  PoolHandle(const PoolHandle&) = delete;
  PoolHandle& operator=(const PoolHandle&) = delete;

  int id() const { return id_; }
  std::optional<int> device() const { return device_; }
  const std::shared_ptr<Pool>& pool() const {
    if (!pool_) throw std::invalid_argument("Pool: it is closed");
    return pool_;
  }

  void Commit(int num_slots) {
    const std::shared_ptr<Pool> held = pool();  // close() may come while we wait.
    const nb::gil_scoped_release release;
    held->Commit(num_slots);
  }

  nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> View(int layer, int slot) const {
    const std::shared_ptr<Pool>& held = pool();
    if (layer < 0 || layer >= held->num_layers() || slot < 0 || slot >= held->committed()) {
      throw nb::index_error(("Pool.view: layer " + std::to_string(layer) + ", slot " +
                             std::to_string(slot) + " is not among " +
                             std::to_string(held->num_layers()) + " layers and " +
                             std::to_string(held->committed()) + " committed slots")
                                .c_str());
    }
    return {held->Block(layer, slot), {static_cast<size_t>(held->block_bytes())}, Keep(held)};
  }

  // A device reads pinned memory at the host's own address: the attribute
  // CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, which x86-64 with unified addressing has.
  nb::ndarray<> Mapped(int layer, int num_heads, Storage storage) const {
    const std::shared_ptr<Pool>& held = pool();
    const int64_t head_bytes = int64_t{num_heads} * ItemBytes(storage);
    if (layer < 0 || layer >= held->num_layers() || held->committed() == 0) {
      throw std::invalid_argument("Pool.mapped: no such layer, or no slot is committed");
    }
    if (num_heads < 1 || held->block_bytes() % head_bytes != 0) {
      throw std::invalid_argument("Pool.mapped: a block of " + std::to_string(held->block_bytes()) +
                                  " bytes has not the same for each of " +
                                  std::to_string(num_heads) + " heads");
    }
    if (held->committed_bytes() / ItemBytes(storage) > std::numeric_limits<int32_t>::max()) {
      throw std::invalid_argument("Pool.mapped: a layer has more numbers than an int32 counts");
    }
    const size_t shape[] = {1, static_cast<size_t>(held->committed()),
                            static_cast<size_t>(num_heads),
                            static_cast<size_t>(held->block_bytes() / head_bytes)};
    nb::dlpack::dtype dtype = nb::dtype<float>();
    if (storage == Storage::kBfloat16) {
      dtype = {static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat), 16, 1};
    }
    const int where = device_ ? nb::device::cuda::value : nb::device::cpu::value;
    return {held->Block(layer, 0), 4, shape, Keep(held), nullptr, dtype, where,
            device_.value_or(0)};
  }

  void Close() {
    if (!pool_) return;
    Pools().Remove(id_);
    pool_.reset();
  }

 private:
  // Keeps the memory as long as an array over it is there.
  static nb::capsule Keep(const std::shared_ptr<Pool>& pool) {
    auto owner = std::make_unique<std::shared_ptr<Pool>>(pool);
    nb::capsule keep(owner.get(),
                     [](void* held) noexcept { delete static_cast<std::shared_ptr<Pool>*>(held); });
    owner.release();
    return keep;
  }

  std::shared_ptr<Pool> pool_;
  std::optional<int> device_;
  int id_;
};

// A step queue and its number.
class QueueHandle {
 public:
  QueueHandle() : queue_(std::make_shared<StepQueue>()), id_(StepQueues().Add(queue_)) {}
  ~QueueHandle() { Close(false); }
  QueueHandle(const QueueHandle&) = delete;
  QueueHandle& operator=(const QueueHandle&) = delete;

  int id() const { return id_; }
  const std::shared_ptr<StepQueue>& queue() const {
    if (!queue_) throw std::invalid_argument("StepQueue: it is closed");
    return queue_;
  }

  void Push(const Int32Table<3>& jobs, int host_pool, const Int32Vector& table_ptr,
            const Int32Vector& table, int load_pool, const Int32Table<3>& loads,
            const Int32Table<2>& stores, const Int32Table<3>& moves) {
    queue()->Push({Borrow(jobs), host_pool, Borrow(table_ptr), Borrow(table), load_pool,
                   Borrow(loads), Borrow(stores), Borrow(moves)});
  }

  bool WaitCompleted(int64_t ticket, double timeout_s) {
    const std::shared_ptr<StepQueue> held = queue();
    const double seconds = timeout_s > 0.0 ? std::min(timeout_s, kMaxTimeoutS) : 0.0;
    const nb::gil_scoped_release release;
    return held->WaitCompleted(ticket, NowNs() + static_cast<int64_t>(seconds * 1e9));
  }

  nb::ndarray<nb::numpy, int64_t, nb::shape<-1, 7>> DrainTimings() {
    const std::vector<StepTiming> timings = queue()->DrainTimings();
    auto numbers = std::make_unique<std::vector<int64_t>>();
    for (const StepTiming& t : timings) {
      numbers->insert(numbers->end(), {t.cpu_ns, t.link_ns, t.link_idle_ns, t.wait_cpu_ns,
                                       t.wait_link_ns, t.host_entries, t.streamed_entries});
    }
    int64_t* const data = numbers->data();
    const nb::capsule keep(numbers.get(), [](void* vector) noexcept {
      delete static_cast<std::vector<int64_t>*>(vector);
    });
    numbers.release();
    return {data, {timings.size(), 7}, keep};
  }

  // The number is free once nothing of this engine runs any more, or the deadline has passed. It
  // never is if a plan is not used up, unless that is known to be `over`: its program may run, and
  // call this number when somebody else has it.
  void Close(bool over) {
    if (!queue_) return;
    const std::shared_ptr<StepQueue> held = std::move(queue_);
    queue_ = nullptr;
    const bool may_be_called = !over && held->MayBeCalled();
    {
      const nb::gil_scoped_release release;
      held->Close(NowNs() + kCloseNs);
    }
    if (!held->OwnedByThisProcess()) return;
    if (may_be_called) {
      StepQueues().Retire(id_);
    } else {
      StepQueues().Remove(id_);
    }
  }

 private:
  std::shared_ptr<StepQueue> queue_;
  int id_;
};

}  // namespace wscope
