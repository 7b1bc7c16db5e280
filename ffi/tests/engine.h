// An engine that runs programs as XLA would, on the host or on the fake device: the same program
// must give the same bits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "fake_device.h"
#include "on_stream.h"
#include "programs.h"
#include "step_queue.h"

namespace wscope {

constexpr int64_t kSoon = 60'000'000'000;

// An engine, with the program's buffers.
class Engine {
 public:
  Engine(bool device, const AttentionShape& shape, int chunks = 2)
      : device(device), shape(shape), chunks(chunks) {
    const int64_t block = shape.block_bytes();
    if (device) {
      page_lock_ = cuda::MakePageLock(0);
      CHECK(Cu().StreamCreate(&stream, 1) == 0);
    }
    unpinned = std::make_shared<Pool>(kLayers, kSlots, block);
    pinned = std::make_shared<Pool>(kLayers, kSlots, block, page_lock_);
    std::mt19937 random(1);
    for (const auto& pool : {unpinned, pinned}) {
      for (const int slots : {1, 3, 4, 9, kSlots}) pool->Commit(slots);  // Pieces of odd sizes.
      for (int layer = 0; layer < kLayers; ++layer) {
        for (int slot = 0; slot < kSlots; ++slot) Fill(pool->Block(layer, slot), block, random);
      }
    }
    pool_ids_[0] = Pools().Add(unpinned);
    pool_ids_[1] = Pools().Add(pinned);
    queue = std::make_unique<StepQueue>();
    MakeArrays();
  }

  ~Engine() {
    if (queue) CHECK(queue->Close(NowNs() + kSoon));
    Wait();
    FreeArrays();
    queue.reset();
    if (stream) Cu().StreamDestroy(stream);
    for (const int id : pool_ids_) Pools().Remove(id);
  }

  // As the handlers do.
  Status Call(const std::function<Status(Carrier&)>& call) {
    Status status;
    if (device) {
      std::shared_ptr<CudaLane> lane;
      status = queue->Cuda(&lane);
      if (status.ok()) {
        OnStream carrier(std::move(lane), stream);
        status = call(carrier);
      }
    } else {
      status = call(HostCarrier());
    }
    return status.ok() ? status : queue->Fail(std::move(status));
  }

  // XLA's own work.
  Status Copy(uint8_t* to, const uint8_t* from, int64_t bytes) const {
    if (!device) {
      std::memcpy(to, from, bytes);
      return Status::Ok();
    }
    return cuda::Check(Cu().MemcpyDtoDAsync(cuda::Address(to), cuda::Address(from), bytes, stream),
                       "XLA");
  }
  // Overwrites what a call has read.
  Status Scribble(uint8_t* to, int64_t bytes) const {
    if (!device) {
      std::memset(to, 0x7f, bytes);
      return Status::Ok();
    }
    return cuda::Check(Cu().MemsetD32Async(cuda::Address(to), 0x7f7f7f7f, bytes / 4, stream),
                       "XLA");
  }
  void Wait() const {
    if (stream) Cu().StreamSynchronize(stream);
  }

  void Push(const Program& program) {
    const auto rows = [](const Numbers& numbers, int64_t columns) {
      return PlanArrays::Table{numbers.data(), static_cast<int64_t>(numbers.size()) / columns};
    };
    Numbers moves = program.moves;
    for (size_t i = 1; i < moves.size(); i += 3) moves[i] = pool_ids_[moves[i]];
    queue->Push({rows(program.jobs, 3), pool_ids_[0], rows(program.row_ptr, 1),
                 rows(program.table, 1), pool_ids_[1], rows(program.loads, 3),
                 rows(program.stores, 2), rows(moves, 3)});
  }

  // Runs a whole step; does not wait for it. Ends at the first failure, as XLA does.
  Status Run(const Program& program) {
    FillSources(program);
    Push(program);
    std::vector<std::function<Status()>> calls;
    calls.push_back([this] { return Call([this](Carrier&) { return queue->Begin(); }); });
    size_t turn = 0;
    for (int layer = 0; layer < kLayers;) {
      const int first = layer;
      const int end = std::min(kLayers, layer + (program.paired ? 2 : 1));
      for (int i = first; i < end; ++i) {
        calls.push_back([this, &program, i] { return Start(program, i); });
      }
      for (; layer < end; ++layer) {
        for (int i = 0; i < program.turns[layer]; ++i, ++turn) {
          calls.push_back([this, turn] { return Load(turn); });
        }
      }
      for (int i = first; i < end; ++i) {
        calls.push_back([this, &program, i] { return Finish(program, i); });
      }
    }
    for (int layer = 0; layer < kLayers; ++layer) {
      calls.push_back([this, layer] { return Store(layer); });
    }
    Status status;
    for (auto call = calls.begin(); status.ok() && call != calls.end(); ++call) status = (*call)();
    num_stores_ += kLayers;
    return status;
  }

  bool WaitStores() { return queue->WaitCompleted(num_stores_, NowNs() + kSoon); }

  // After Wait.
  bool SameResults(const Engine& other, const Program& program) const {
    const int64_t block = shape.block_bytes();
    for (int job = 0; job < kLayers; ++job) {
      const int64_t heads = int64_t{program.jobs[3 * job + 2]} * shape.num_q_heads;
      if (Differ(O(job), other.O(job), heads * shape.value_dim * 4)) return false;
      if (Differ(Lse(job), other.Lse(job), heads * 4)) return false;
    }
    for (size_t turn = 0; turn < program.loads.size() / 3; ++turn) {
      const int64_t bytes = program.loads[3 * turn + 2] * block;
      if (Differ(Seen(turn), other.Seen(turn), bytes)) return false;
    }
    return true;
  }
  // After WaitStores.
  bool SamePools(const Engine& other) const {
    for (int layer = 0; layer < kLayers; ++layer) {
      const int64_t bytes = kSlots * shape.block_bytes();
      if (Differ(unpinned->Block(layer, 0), other.unpinned->Block(layer, 0), bytes)) return false;
      if (Differ(pinned->Block(layer, 0), other.pinned->Block(layer, 0), bytes)) return false;
    }
    return true;
  }

  void FreeArrays() { arrays_.clear(); }

  ChunkSlots Slots() const { return {arrays_[0]->data(), chunks, kCapacity, shape.block_bytes()}; }
  uint8_t* Seen(size_t turn) const {
    return arrays_[1]->data() + turn * kCapacity * shape.block_bytes();
  }

  float* O(int job) const {
    return arrays_[3]->floats() + job * kRows * shape.num_q_heads * shape.value_dim;
  }
  float* Lse(int job) const { return arrays_[4]->floats() + job * kRows * shape.num_q_heads; }

  const bool device;
  const AttentionShape shape;
  const int chunks;               // Slots of the PING-PONG region.
  cuda::Stream stream = nullptr;  // XLA's.
  std::shared_ptr<Pool> unpinned, pinned;
  std::unique_ptr<StepQueue> queue;

  Status Start(const Program& program, int layer) {
    const int64_t rows = program.jobs[3 * layer + 2];
    const int64_t bytes = rows * shape.num_q_heads * shape.key_dim * ItemBytes(shape.storage);
    Status status = Copy(Q(), QSource(layer), bytes);
    if (status.ok()) {
      status = Call([&](Carrier& carrier) {
        return queue->StartJob(shape, rows, Q(), shape.storage, carrier);
      });
    }
    return status.ok() ? Scribble(Q(), bytes) : status;
  }

  Status Finish(const Program& program, int layer) {
    return Call([&](Carrier& carrier) {
      return queue->FinishJob(program.jobs[3 * layer + 2], shape.num_q_heads, shape.value_dim,
                              O(layer), Lse(layer), carrier);
    });
  }

  Status Load(size_t turn) {
    const Status status = Call([&](Carrier& carrier) { return queue->Load(Slots(), carrier); });
    const int64_t bytes = kCapacity * shape.block_bytes();
    return status.ok() ? Copy(Seen(turn), Slots().Of(turn), bytes) : status;
  }

  Status Store(int layer) {
    const int64_t bytes = kBlocks * shape.block_bytes();
    uint8_t* const operand = arrays_[5]->data();
    Status status = Copy(operand, arrays_[6]->data() + layer * bytes, bytes);
    if (status.ok()) {
      status = Call([&](Carrier& carrier) {
        return queue->Store(operand, kBlocks, shape.block_bytes(), carrier);
      });
    }
    return status.ok() ? Scribble(operand, bytes) : status;
  }

 private:
  static bool Differ(const void* a, const void* b, int64_t bytes) {
    return std::memcmp(a, b, bytes) != 0;
  }

  int64_t QBytes() const {
    return kRows * shape.num_q_heads * shape.key_dim * ItemBytes(shape.storage);
  }
  uint8_t* Q() const { return arrays_[2]->data(); }
  uint8_t* QSource(int layer) const { return arrays_[2]->data() + (1 + layer) * QBytes(); }
  void MakeArrays() {
    const int64_t block = shape.block_bytes();
    const int64_t heads = int64_t{kLayers} * kRows * shape.num_q_heads;
    for (const int64_t bytes :
         {chunks * kCapacity * block, kMostTurns * kCapacity * block, (1 + kLayers) * QBytes(),
          heads * shape.value_dim * 4, heads * 4, kBlocks * block, kLayers * kBlocks * block}) {
      arrays_.push_back(std::make_unique<Array>(device, bytes));
    }
  }

  // Numbers of about 1.
  void Fill(uint8_t* to, int64_t bytes, std::mt19937& random) const {
    for (int64_t at = 0; at < bytes; at += ItemBytes(shape.storage)) {
      const float value = static_cast<float>(random() % 4096) / 1024.0f - 2.0f;
      uint8_t bytes_of[sizeof(value)];
      std::memcpy(bytes_of, &value, sizeof(value));
      // A bfloat16 is the upper half.
      const int64_t size = ItemBytes(shape.storage);
      std::memcpy(to + at, bytes_of + sizeof(value) - size, size);
    }
  }

  // The program before must have ended.
  void FillSources(const Program& program) {
    std::mt19937 random(program.values_seed);
    Fill(QSource(0), kLayers * QBytes(), random);
    Fill(arrays_[6]->data(), kLayers * kBlocks * shape.block_bytes(), random);
  }

  std::shared_ptr<PageLock> page_lock_;
  int pool_ids_[2];
  int64_t num_stores_ = 0;
  std::vector<std::unique_ptr<Array>> arrays_;  // slots, seen, q, o, lse, blocks, their source
};

}  // namespace wscope
