// Stores from a device: the bytes of the moment, in pinned and other slots, before their ticket.
#include "cuda_store.h"

#include <algorithm>
#include <thread>
#include <vector>

#include "check.h"
#include "engine.h"

namespace wscope {
namespace {

// Stores of blocks of any size to layer 0 of a pool that is pinned and one that is not.
class Stores {
 public:
  Stores(int64_t block_bytes, int num_blocks, int num_stores = 1)
      : bytes(block_bytes),
        count(num_blocks),
        pools{
            std::make_shared<Pool>(1, num_stores * num_blocks, block_bytes),
            std::make_shared<Pool>(1, num_stores * num_blocks, block_bytes, cuda::MakePageLock(0))},
        blocks(true, block_bytes * num_blocks) {
    for (int i = 0; i < 2; ++i) {
      pools[i]->Commit(std::max(1, num_blocks / 3));
      pools[i]->Commit(num_stores * num_blocks);
      ids[i] = Pools().Add(pools[i]);
    }
  }
  ~Stores() {
    for (const int id : ids) Pools().Remove(id);
  }

  // The blocks one after the other to slots of the pools in turn, or of the one given.
  void Push(StepQueue& queue, int num_stores, int pool = -1) const {
    Numbers stores, moves;
    for (int store = 0; store < num_stores; ++store) {
      stores.insert(stores.end(), {0, count});
      for (int i = 0; i < count; ++i) {
        moves.insert(moves.end(), {i, ids[pool < 0 ? i % 2 : pool], store * count + i});
      }
    }
    PlanArrays arrays;
    arrays.stores = {stores.data(), num_stores};
    arrays.moves = {moves.data(), int64_t{num_stores} * count};
    queue.Push(arrays);
    CHECK(queue.Begin().ok());
  }

  // With what `fill` makes of it; XLA overwrites the operand behind the call.
  void Store(Engine& engine, int fill) const {
    for (int i = 0; i < count; ++i) Set(engine, i, fill + i);
    CHECK(engine
              .Call([&](Carrier& carrier) {
                return engine.queue->Store(blocks.data(), count, bytes, carrier);
              })
              .ok());
    CHECK(engine.Scribble(blocks.data(), bytes * count).ok());
  }

  bool Has(int pool, int slot, int value) const {
    const uint8_t* const block = pools[pool]->Block(0, slot);
    return std::all_of(block, block + bytes,
                       [&](uint8_t byte) { return byte == static_cast<uint8_t>(value); });
  }

  const int64_t bytes;
  const int count;
  const std::shared_ptr<Pool> pools[2];
  const Array blocks;
  int ids[2];

 private:
  void Set(const Engine& engine, int block, int value) const {
    CHECK(Cu().MemsetD32Async(cuda::Address(blocks.data() + block * bytes),
                              0x01010101u * static_cast<uint8_t>(value), bytes / 4,
                              engine.stream) == 0);
  }
};

void TestPlaces(Engine& engine, int64_t block_bytes, int num_blocks) {
  const Stores stores(block_bytes, num_blocks);
  const int64_t done = engine.queue->mover().completed();
  for (const int pool : {-1, 0, 1}) {
    stores.Push(*engine.queue, 1, pool);
    stores.Store(engine, 3 + pool);
    CHECK(engine.queue->WaitCompleted(done + 2 + pool, NowNs() + kSoon));
    for (int i = 0; i < num_blocks; ++i)
      CHECK(stores.Has(pool < 0 ? i % 2 : pool, i, 3 + pool + i));
  }
  engine.Wait();
}

// A ticket is completed after its bytes are there and in its order; none before the device is.
void TestTickets(Engine& engine) {
  constexpr int kStores = 30;
  const Stores stores(20'480, 3, kStores);
  const int64_t done = engine.queue->mover().completed();
  stores.Push(*engine.queue, kStores);
  Fake::Get().hold(1);
  for (int store = 0; store < kStores; ++store) stores.Store(engine, 10 * store);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK(engine.queue->mover().completed() == done && engine.queue->mover().staged_bytes() > 0);
  Fake::Get().hold(0);
  for (int store = 0; store < kStores; ++store) {
    CHECK(engine.queue->WaitCompleted(done + 1 + store, NowNs() + kSoon));
    for (int i = 0; i < 3; ++i) CHECK(stores.Has(i % 2, store * 3 + i, 10 * store + i));
  }
  engine.Wait();
}

}  // namespace
}  // namespace wscope

int main() {
  wscope::EnterContext();
  const FakeCudaLive before = wscope::Fake::Get().live();
  {
    wscope::Engine engine(true, wscope::ShapeOf(0));
    wscope::Fake::Get().delay_us(300);
    wscope::TestPlaces(engine, 20'480, 7);    // A block lies in two pinned pieces.
    wscope::TestPlaces(engine, 1 << 20, 20);  // More than the bounce buffer takes at once.
    wscope::TestPlaces(engine, 17 << 20, 2);  // A block that is larger.
    wscope::TestTickets(engine);
  }
  CHECK(wscope::BecomesLive(before));
}
