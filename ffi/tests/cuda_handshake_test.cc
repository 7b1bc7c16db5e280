// The turn between a stream and the workers, by stream memory operations: right results however
// slow the job, and a stream that waits for a flag is let go by whatever ends a step early.
#include "cuda_handshake.h"

#include <chrono>
#include <cmath>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "engine.h"
#include "workers.h"

namespace wscope {
namespace {

constexpr int64_t kMs = 1'000'000;

// A step with jobs over blocks, two open at a time.
const Program& AProgram() {
  static const Program program = [] {
    for (unsigned seed = 0;; ++seed) {
      Program by_chance(seed, 0);
      if (by_chance.paired && by_chance.table.size() > 4) return by_chance;
    }
  }();
  return program;
}

// The number of jobs that have blocks.
int NumRealJobs(const Program& program) {
  int count = 0;
  for (int layer = 0; layer < kLayers; ++layer) {
    const int32_t* const job = &program.jobs[3 * layer];
    count += program.row_ptr[job[1]] < program.row_ptr[job[1] + job[2]];
  }
  return count;
}

// Right, or not computed: then it is not a number.
bool SameOrVoid(const Engine& engine, const Engine& host, const Program& program, bool* any_void) {
  for (int job = 0; job < kLayers; ++job) {
    const int64_t heads = int64_t{program.jobs[3 * job + 2]} * engine.shape.num_q_heads;
    const int64_t o = heads * engine.shape.value_dim;
    if (std::isnan(engine.Lse(job)[0])) {
      for (int64_t i = 0; i < heads; ++i) CHECK(std::isnan(engine.Lse(job)[i]));
      *any_void = true;
    } else if (std::memcmp(engine.O(job), host.O(job), o * sizeof(float)) != 0 ||
               std::memcmp(engine.Lse(job), host.Lse(job), heads * sizeof(float)) != 0) {
      return false;
    }
  }
  return true;
}

void TestChoice() {
  for (const bool stream_memory : {true, false}) {
    Fake::Get().stream_memory(stream_memory);
    Engine engine(true, ShapeOf(0));
    CHECK(engine.queue->HandshakeName().empty());
    CHECK(engine.Run(AProgram()).ok());
    const std::string name = engine.queue->HandshakeName();
    CHECK(name.find(stream_memory ? "stream memory operations" : "host callbacks (the device") ==
          0);
  }
  Fake::Get().stream_memory(true);
}

// The stream stands still until the job has ended, and the times say so.
void TestSlowJobs() {
  Engine host(false, ShapeOf(0)), engine(true, ShapeOf(0));
  CHECK(host.Run(AProgram()).ok());
  engine.queue->SetFault(0, 20);
  CHECK(engine.Run(AProgram()).ok());
  engine.Wait();
  CHECK(engine.SameResults(host, AProgram()));
  std::vector<StepTiming> timings;
  while (timings.empty()) timings = engine.queue->DrainTimings();
  const int jobs = NumRealJobs(AProgram());
  CHECK(jobs > 2 && timings.size() == 1);
  CHECK(timings[0].cpu_ns >= jobs * 20 * kMs && timings[0].wait_cpu_ns > 5 * kMs);
}

// While slow jobs are waited for, copies wait for slots, unless there is one for each chunk.
void TestIdleLink() {
  for (const int chunks : {2, kMostTurns}) {
    Engine engine(true, ShapeOf(0), chunks);
    engine.queue->SetFault(0, 20);
    for (int step = 0; step < 3; ++step) {
      CHECK(engine.Run(AProgram()).ok());
      engine.Wait();
      std::vector<StepTiming> timings;
      while (timings.empty()) timings = engine.queue->DrainTimings();
      CHECK(timings[0].wait_cpu_ns > 5 * kMs);
      CHECK(chunks == 2 ? timings[0].link_idle_ns > 5 * kMs : timings[0].link_idle_ns == 0);
    }
  }
}

// The device is late: the workers wait for it, and the times say that too.
void TestSlowDevice() {
  Engine host(false, ShapeOf(0)), engine(true, ShapeOf(0));
  CHECK(host.Run(AProgram()).ok());
  Fake::Get().hold(1);
  CHECK(engine.Run(AProgram()).ok());
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  Fake::Get().hold(0);
  engine.Wait();
  CHECK(engine.SameResults(host, AProgram()));
  std::vector<StepTiming> timings;
  while (timings.empty()) timings = engine.queue->DrainTimings();
  CHECK(timings[0].cpu_ns < 50 * kMs * NumRealJobs(AProgram()));
}

// After two steps that were launched before the device did anything, no step makes an event or a
// buffer that stays. Two: the last copies of a step are known until those of the next have begun.
void TestSteady() {
  Engine engine(true, ShapeOf(0));
  FakeCudaLive first{};
  for (int step = 0; step < 30; ++step) {
    Fake::Get().hold(step < 2);
    CHECK(engine.Run(AProgram()).ok());
    Fake::Get().hold(0);
    CHECK(engine.WaitStores());
    engine.Wait();
    while (engine.queue->DrainTimings().empty()) std::this_thread::yield();
    if (step == 1) first = Fake::Get().live();
  }
  const FakeCudaLive now = Fake::Get().live();
  CHECK(now.pinned == first.pinned && now.events <= first.events);
}

// A step fails when one before it is under way: that one keeps its results, the jobs of the failing
// one are let go, however slow they are.
void TestPoison(int starts) {
  const FakeCudaLive before = Fake::Get().live();
  {
    Engine host(false, ShapeOf(0)), engine(true, ShapeOf(0));
    CHECK(host.Run(AProgram()).ok());
    Fake::Get().hold(1);
    CHECK(engine.Run(AProgram()).ok());
    engine.queue->SetFault(0, 5000);
    engine.Push(AProgram());
    CHECK(engine.queue->Begin().ok());
    for (int job = 0; job < starts; ++job) CHECK(engine.Start(AProgram(), job).ok());
    std::thread release([] {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      Fake::Get().hold(0);
    });
    const int64_t start = NowNs();
    const Status status = engine.Call([&](Carrier&) { return engine.queue->Begin(); });
    CHECK(status.kind == Status::Kind::kFailedPrecondition);
    release.join();
    engine.Wait();
    CHECK(engine.queue->Close(NowNs() + kSoon));
    CHECK(NowNs() - start < 5000 * kMs);
    CHECK(engine.SameResults(host, AProgram()));
  }
  CHECK(BecomesLive(before));
}

// The engine is closed while a stream waits: what has begun ends, what has not is let go.
void TestClose(int after_ms) {
  const FakeCudaLive before = Fake::Get().live();
  {
    Engine host(false, ShapeOf(0)), engine(true, ShapeOf(0));
    CHECK(host.Run(AProgram()).ok());
    engine.queue->SetFault(0, 100);
    CHECK(engine.Run(AProgram()).ok());
    std::this_thread::sleep_for(std::chrono::milliseconds(after_ms));
    const int64_t start = NowNs();
    CHECK(engine.queue->Close(NowNs() + kSoon));
    CHECK(NowNs() - start < NumRealJobs(AProgram()) * 100 * kMs);
    engine.Wait();
    bool any_void = false;
    CHECK(SameOrVoid(engine, host, AProgram(), &any_void) && any_void);
  }
  CHECK(BecomesLive(before));
}

// The device hangs beyond the deadline: its memory stays, and when it goes on nothing breaks.
void TestHang() {
  Engine host(false, ShapeOf(0)), engine(true, ShapeOf(0));
  CHECK(host.Run(AProgram()).ok());
  Fake::Get().hold(1);
  CHECK(engine.Run(AProgram()).ok());
  CHECK(!engine.queue->Close(NowNs() + 50 * kMs));
  Fake::Get().hold(0);
  engine.Wait();
  bool any_void = false;
  CHECK(SameOrVoid(engine, host, AProgram(), &any_void) && any_void);
  CHECK(engine.queue->Close(NowNs() + kSoon));
}

// Engines of two threads, one of them with slow jobs.
void TestTwoEngines() {
  Fake::Get().delay_us(100);
  std::vector<std::thread> threads;
  for (const int delay_ms : {0, 2}) {
    threads.emplace_back([delay_ms] {
      EnterContext();
      Engine host(false, ShapeOf(delay_ms / 2)), engine(true, ShapeOf(delay_ms / 2));
      engine.queue->SetFault(0, delay_ms);
      for (unsigned step = 0; step < 25; ++step) {
        const Program program(100 + step, static_cast<int>(step % 2));
        CHECK(host.Run(program).ok() && engine.Run(program).ok());
        engine.Wait();
        CHECK(engine.SameResults(host, program));
        CHECK(host.WaitStores() && engine.WaitStores());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  Fake::Get().delay_us(0);
}

// The workers go while tasks are armed: every stream passes. What comes later is refused.
void TestNoWorkers() {
  const FakeCudaLive before = Fake::Get().live();
  {
    Engine host(false, ShapeOf(0)), engine(true, ShapeOf(0));
    CHECK(host.Run(AProgram()).ok());
    Fake::Get().hold(1);
    CHECK(engine.Run(AProgram()).ok());
    Workers::Get().Stop();
    Fake::Get().hold(0);
    engine.Wait();
    bool any_void = false;
    CHECK(SameOrVoid(engine, host, AProgram(), &any_void) && any_void);
    CHECK(engine.WaitStores());
    CHECK(engine.queue->Close(NowNs() + kSoon));
  }
  CHECK(BecomesLive(before));
}

}  // namespace
}  // namespace wscope

int main() {
  wscope::EnterContext();
  wscope::Workers::Get().Start(2);
  wscope::TestChoice();
  wscope::TestSlowJobs();
  wscope::TestIdleLink();
  wscope::TestSlowDevice();
  wscope::TestSteady();
  for (const int starts : {0, 1, 2}) wscope::TestPoison(starts);
  for (const int after_ms : {0, 20, 120}) wscope::TestClose(after_ms);
  wscope::TestHang();
  wscope::TestTwoEngines();
  wscope::TestNoWorkers();
}
