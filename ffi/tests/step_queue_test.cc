// Pairing of calls with plans: what goes through, what is refused, and what a failure leaves
// behind.
#include "step_queue.h"

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "clock.h"

namespace wscope {
namespace {

using Numbers = std::vector<int32_t>;

constexpr int64_t kSoon = 20'000'000'000;
// One block: 32 entries of key 1 and value 1, float32.
const AttentionShape kShape{1, 1, 1, 1, false, 32, Storage::kFloat32, 1.0f};
constexpr int64_t kBlockBytes = 256;

bool Refused(const Status& status, Status::Kind kind, const std::string& part) {
  if (status.kind == kind && status.text.find(part) != std::string::npos) return true;
  std::fprintf(stderr, "got: %s\n", status.text.c_str());
  return false;
}

bool Precondition(const Status& status, const std::string& part) {
  return Refused(status, Status::Kind::kFailedPrecondition, part);
}

bool Argument(const Status& status, const std::string& part) {
  return Refused(status, Status::Kind::kInvalidArgument, part);
}

class Engine {
 public:
  Engine() {
    pool->Commit(4);
    for (int layer = 0; layer < 2; ++layer) {
      for (int slot = 0; slot < 4; ++slot) {
        float* const block = reinterpret_cast<float*>(pool->Block(layer, slot));
        for (int i = 0; i < 32; ++i) {
          block[i] = 0.0f;  // Equal scores: the output is the mean of the values.
          block[32 + i] = static_cast<float>(10 * layer + slot);
        }
      }
    }
  }
  ~Engine() {
    CHECK(queue.Close(NowNs() + kSoon));
    Pools().Remove(pool_id);
  }

  void Push(const Numbers& jobs, const Numbers& loads = {}, const Numbers& stores = {},
            const Numbers& moves = {}) {
    const auto rows = [](const Numbers& numbers, int64_t columns) {
      return PlanArrays::Table{numbers.data(), static_cast<int64_t>(numbers.size()) / columns};
    };
    static const Numbers row_ptr{0, 2, 2, 3};  // Rows with 2, 0 and 1 blocks.
    static const Numbers table{1, 3, 2};
    queue.Push({rows(jobs, 3), pool_id, rows(row_ptr, 1), rows(table, 1), pool_id, rows(loads, 3),
                rows(stores, 2), rows(moves, 3)});
  }

  Status Start(int64_t num_rows) {
    const std::vector<float> q(num_rows, 1.0f);
    return queue.StartJob(kShape, num_rows, q.data(), Storage::kFloat32);
  }
  Status Finish(int64_t num_rows) {
    o.assign(num_rows, -1.0f);
    lse.assign(num_rows, -1.0f);
    return queue.FinishJob(num_rows, 1, 1, o.data(), lse.data());
  }

  std::shared_ptr<Pool> pool = std::make_shared<Pool>(2, 4, kBlockBytes);
  int pool_id = Pools().Add(pool);
  StepQueue queue;
  std::vector<float> o, lse;
};

void TestJobs() {
  Engine engine;
  CHECK(engine.queue.Idle());
  engine.Push({0, 0, 3, 1, 2, 1, 1, 1, 1});
  CHECK(!engine.queue.Idle());
  CHECK(engine.queue.Begin().ok());
  CHECK(engine.Start(3).ok());
  CHECK(engine.Start(1).ok());  // Two open.
  CHECK(engine.Finish(3).ok());
  CHECK(engine.o == (std::vector<float>{2.0f, 0.0f, 2.0f}));
  CHECK(std::abs(engine.lse[0] - std::log(64.0f)) < 1e-6f && std::isinf(engine.lse[1]));
  CHECK(engine.Finish(1).ok());
  CHECK(engine.o[0] == 12.0f);
  CHECK(!engine.queue.Idle());
  CHECK(engine.Start(1).ok() && engine.Finish(1).ok());
  CHECK(engine.o[0] == 0.0f && std::isinf(engine.lse[0]));
  CHECK(engine.queue.Idle());
  const std::vector<StepTiming> timings = engine.queue.DrainTimings();
  CHECK(timings.size() == 1 && engine.queue.DrainTimings().empty());
  CHECK(timings[0].host_entries == 4 * 32 && timings[0].cpu_ns > 0 && timings[0].link_ns > 0);
}

void TestDelayedJob() {
  Engine engine;
  engine.queue.SetFault(0, 400);
  engine.Push({0, 0, 3});
  CHECK(engine.queue.Begin().ok());
  const int64_t start = NowNs();
  CHECK(engine.Start(3).ok());
  CHECK(NowNs() - start < 300'000'000);  // It did not wait for the job.
  CHECK(engine.Finish(3).ok());
  CHECK(NowNs() - start >= 400'000'000);
  const StepTiming timing = engine.queue.DrainTimings().at(0);
  CHECK(timing.cpu_ns >= 400'000'000 && timing.wait_cpu_ns > 0 && timing.wait_link_ns == 0);
}

void TestLoads() {
  Engine engine;
  engine.Push({0, 0, 3}, {0, 1, 2, 1, 0, 1, 0, 0, 0, 1, 3, 1});
  CHECK(engine.queue.Begin().ok() && engine.Start(3).ok());
  std::vector<float> slots(2 * 2 * 64, -1.0f);
  const auto load = [&] {
    return engine.queue.Load({reinterpret_cast<uint8_t*>(slots.data()), 2, 2, kBlockBytes});
  };
  CHECK(load().ok());
  CHECK(slots[32] == 1.0f && slots[64 + 32] == 2.0f && slots[128 + 32] == -1.0f);
  CHECK(load().ok());
  CHECK(slots[128 + 32] == 10.0f && slots[192 + 32] == -1.0f && slots[32] == 1.0f);
  CHECK(load().ok());  // Copies nothing, but it is a turn.
  CHECK(slots[32] == 1.0f);
  CHECK(load().ok());
  CHECK(slots[128 + 32] == 13.0f && slots[32] == 1.0f);
  CHECK(engine.Finish(3).ok() && engine.queue.Idle());
  CHECK(engine.queue.DrainTimings().at(0).streamed_entries == 4 * 32);
}

void TestStores() {
  Engine engine;
  engine.queue.SetFault(5, 0);
  engine.Push({}, {}, {0, 2, 1, 0, 1, 1},
              {2, engine.pool_id, 0, 0, engine.pool_id, 1,  //
               1, engine.pool_id, 3});
  CHECK(engine.queue.Begin().ok());
  std::vector<uint8_t> blocks(3 * kBlockBytes);
  for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = uint8_t(1 + i / kBlockBytes);
  for (int i = 0; i < 3; ++i) CHECK(engine.queue.Store(blocks.data(), 3, kBlockBytes).ok());
  CHECK(engine.queue.Idle());
  blocks.assign(blocks.size(), 99);  // The operand is the caller's again.
  CHECK(engine.queue.mover().staged_high_water() == 2);
  CHECK(engine.queue.WaitCompleted(3, NowNs() + kSoon));
  CHECK(engine.queue.mover().completed() == 3);
  CHECK(engine.pool->Block(0, 0)[0] == 3 && engine.pool->Block(0, 1)[kBlockBytes - 1] == 1);
  CHECK(engine.pool->Block(1, 3)[0] == 2);
  CHECK(engine.queue.DrainTimings().empty());
}

void TestPairing() {
  {
    Engine engine;
    CHECK(Precondition(engine.queue.Begin(), "step_begin: no plan was pushed"));
    CHECK(Precondition(engine.Start(1), "host_start: no plan is in use"));
    CHECK(Precondition(engine.Finish(1), "host_finish: no job is open"));
    CHECK(Precondition(engine.queue.Load({nullptr, 2, 0, 0}), "load: no plan is in use"));
    CHECK(Precondition(engine.queue.Store(nullptr, 0, 0), "store: no plan is in use"));
  }
  Engine engine;
  engine.Push({0, 0, 3, 0, 0, 3, 0, 0, 3});
  engine.Push({});
  CHECK(engine.queue.Begin().ok());
  CHECK(Precondition(engine.queue.Begin(), "not used up (0 of 3 jobs started"));
  CHECK(Argument(engine.Start(2), "q: has 2 rows, the plan's job has 3"));
  AttentionShape wide = kShape;
  wide.key_dim = 2;
  const float q[6] = {};
  CHECK(Argument(engine.queue.StartJob(wide, 3, q, Storage::kFloat32), "blocks of 384 bytes"));
  CHECK(engine.Start(3).ok() && engine.Start(3).ok());
  CHECK(Precondition(engine.Start(3), "two jobs are open"));
  CHECK(Argument(engine.Finish(2), "o: is [2, 1, 1]"));
  CHECK(engine.Finish(3).ok() && engine.Start(3).ok());
  CHECK(Precondition(engine.Start(3), "no such call left"));
  CHECK(engine.Finish(3).ok() && engine.Finish(3).ok());
  CHECK(Precondition(engine.Finish(3), "no job is open"));
  CHECK(engine.queue.Begin().ok() && engine.queue.Idle());
}

// A program that did not start leaves no plan behind; one that has begun keeps its own.
void TestTakeBack() {
  Engine engine;
  CHECK(!engine.queue.TakeBack());
  engine.Push({0, 0, 3});
  engine.Push({0, 0, 1});
  CHECK(engine.queue.TakeBack());
  CHECK(engine.queue.Begin().ok());
  CHECK(!engine.queue.TakeBack());
  CHECK(engine.Start(3).ok() && engine.Finish(3).ok());
  CHECK(engine.queue.Idle());
}

void TestOperands() {
  Engine engine;
  engine.Push({}, {0, 0, 3}, {0, 1}, {2, engine.pool_id, 0});
  CHECK(engine.queue.Begin().ok());
  uint8_t bytes[2 * 3 * 128];
  CHECK(Argument(engine.queue.Load({bytes, 2, 2, kBlockBytes}), "slots: has room for 2 slots"));
  CHECK(Argument(engine.queue.Load({bytes, 2, 3, 128}), "slots: a block"));
  CHECK(Argument(engine.queue.Store(bytes, 2, kBlockBytes), "blocks: has 2 blocks"));
  CHECK(Argument(engine.queue.Store(bytes, 6, 128), "blocks: a block"));
}

void TestPoison() {
  Engine engine;
  engine.queue.SetFault(20, 20);
  engine.Push({0, 0, 3}, {}, {0, 1}, {0, engine.pool_id, 0});
  engine.Push({});
  CHECK(engine.queue.Begin().ok() && engine.Start(3).ok());
  std::vector<uint8_t> blocks(kBlockBytes, 7);
  CHECK(engine.queue.Store(blocks.data(), 1, kBlockBytes).ok());
  std::thread waiter([&] { CHECK(!engine.queue.WaitCompleted(9, NowNs() + kSoon)); });
  CHECK(Precondition(engine.queue.Fail(Status::FailedPrecondition("first")), "first"));
  engine.queue.Fail(Status::Internal("second"));
  waiter.join();
  CHECK(engine.queue.Poison() == std::string("first") && engine.queue.Idle());
  CHECK(Precondition(engine.queue.Begin(), "an earlier call failed: first"));
  CHECK(Precondition(engine.Finish(3), "an earlier call failed: first"));
  CHECK(Throws<std::runtime_error>([&] { engine.Push({}); }, "an earlier call failed: first"));
  // What was under way still ends: the job, and the store's bytes.
  CHECK(engine.queue.Close(NowNs() + kSoon));
  CHECK(engine.queue.mover().completed() == 1 && engine.pool->Block(0, 0)[0] == 7);
}

void TestClose() {
  Engine engine;
  engine.queue.SetFault(0, 30);
  engine.Push({0, 0, 3});
  CHECK(engine.queue.Begin().ok() && engine.Start(3).ok());
  CHECK(!engine.queue.Close(NowNs() + 1'000'000));
  CHECK(engine.queue.Close(NowNs() + kSoon) && engine.queue.Close(NowNs() + kSoon));
  CHECK(Precondition(engine.queue.Begin(), "closed") && Precondition(engine.Finish(3), "closed"));
  CHECK(Throws<std::invalid_argument>([&] { engine.Push({}); }, "closed"));
}

// Two engines at a time, each on its own thread, over the same workers.
void TestTwoEngines() {
  std::thread threads[2];
  for (std::thread& thread : threads) {
    thread = std::thread([] {
      Engine engine;
      for (int step = 0; step < 50; ++step) {
        engine.Push({0, 0, 3, 1, 0, 3}, {}, {0, 1}, {0, engine.pool_id, 0});
        CHECK(engine.queue.Begin().ok());
        for (int layer = 0; layer < 2; ++layer) {
          CHECK(engine.Start(3).ok() && engine.Finish(3).ok());
          CHECK(engine.o[0] == 10.0f * float(layer) + 2.0f);
        }
        const std::vector<uint8_t> blocks(kBlockBytes, 1);
        CHECK(engine.queue.Store(blocks.data(), 1, kBlockBytes).ok());
        CHECK(engine.queue.Idle());
      }
      CHECK(engine.queue.WaitCompleted(50, NowNs() + kSoon));
      CHECK(engine.queue.DrainTimings().size() == 50);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void TestFork() {
  Engine engine;
  engine.Push({});
  const pid_t child = fork();
  if (child == 0) {
    const bool good = Throws<std::runtime_error>([&] { engine.Push({}); }, "fork") &&
                      !engine.queue.OwnedByThisProcess() && engine.queue.Close(NowNs() + kSoon);
    _exit(good ? 0 : 1);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
}

void TestNoWorkers() {
  Engine engine;
  CHECK(Throws<std::runtime_error>([&] { engine.Push({0, 0, 3}); }, "start_workers"));
  engine.Push({});
}

}  // namespace
}  // namespace wscope

int main() {
  wscope::TestNoWorkers();
  wscope::Workers::Get().Start(2);
  wscope::TestJobs();
  wscope::TestDelayedJob();
  wscope::TestLoads();
  wscope::TestStores();
  wscope::TestPairing();
  wscope::TestTakeBack();
  wscope::TestOperands();
  wscope::TestPoison();
  wscope::TestClose();
  wscope::TestTwoEngines();
  wscope::TestFork();
  wscope::Workers::Get().Stop();
}
