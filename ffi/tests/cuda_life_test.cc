// How an engine with a device ends: in time, or with a stream that hangs, and the process after it.
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "check.h"
#include "engine.h"
#include "workers.h"

namespace wscope {
namespace {

constexpr int64_t kAtOnce = 20'000'000;

// A step with jobs over blocks, loads and stores.
const Program& AProgram() {
  static const Program program(3, 0);
  return program;
}

void WaitForStreams() {
  while (Fake::Get().live().pending > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void TestDelayedStore() {
  const FakeCudaLive before = Fake::Get().live();
  {
    Engine engine(true, ShapeOf(0));
    engine.queue->SetFault(100, 0);
    CHECK(engine.Run(AProgram()).ok());
    CHECK(!engine.queue->Close(NowNs() + kAtOnce));
    CHECK(!engine.queue->Begin().ok());
    CHECK(engine.queue->Close(NowNs() + kSoon));
    CHECK(engine.queue->mover().completed() == kLayers);
  }
  CHECK(BecomesLive(before));
}

// The mover outlives its queue, and the lane with it.
void TestLetGo() {
  const FakeCudaLive before = Fake::Get().live();
  {
    Engine engine(true, ShapeOf(0));
    engine.queue->SetFault(30, 0);
    CHECK(engine.Run(AProgram()).ok());
    engine.Wait();
    Elsewhere([&] { engine.queue.reset(); });
  }
  CHECK(BecomesLive(before));
}

void StartOnly(Engine& engine) {
  engine.Push(AProgram());
  CHECK(engine.queue->Begin().ok());
  CHECK(engine.Start(AProgram(), 0).ok() && engine.Start(AProgram(), 1).ok());
  CHECK(engine.Load(0).ok());
}

void TestOpenJobs(bool close) {
  const FakeCudaLive before = Fake::Get().live();
  {
    Engine engine(true, ShapeOf(0));
    Fake::Get().delay_us(2000);
    engine.queue->SetFault(0, 30);
    StartOnly(engine);
    if (close) CHECK(engine.queue->Close(NowNs() + kSoon));
    Elsewhere([&] { engine.queue.reset(); });
    Fake::Get().delay_us(0);
  }
  CHECK(BecomesLive(before));
}

// Nothing that a hanging stream may still touch goes, and the process lives on when it goes on.
void TestHangingStream(bool whole_step) {
  Engine engine(true, ShapeOf(0));
  Fake::Get().hold(1);
  if (whole_step) {
    CHECK(engine.Run(AProgram()).ok());
  } else {
    StartOnly(engine);
  }
  const int64_t start = NowNs();
  CHECK(!engine.queue->Close(start + kAtOnce));
  Elsewhere([&] { engine.queue.reset(); });
  CHECK(NowNs() - start < 5'000'000'000);
  Fake::Get().hold(0);
  WaitForStreams();
}

// From some call on all of them fail: the device is lost. Nobody waits for what will not come.
void TestLost() {
  for (const int n : {1, 4, 30, 60, 90, 120, 150, 200}) {
    Engine engine(true, ShapeOf(0));
    Fake::Get().fail_at(n, 999, true);
    const int64_t start = NowNs();
    if (engine.Run(AProgram()).ok()) engine.WaitStores();
    engine.queue->Close(NowNs() + kSoon);
    Elsewhere([&] { engine.queue.reset(); });
    CHECK(Fake::Get().failed() != nullptr && NowNs() - start < 10'000'000'000);
    WaitForStreams();
    Fake::Get().fail_at(0, 0, false);
  }
}

// A child has neither the driver nor the threads; what it inherited dies without them.
void TestFork() {
  Engine engine(true, ShapeOf(0));
  CHECK(engine.Run(AProgram()).ok());
  CHECK(engine.WaitStores());
  engine.Wait();
  const pid_t child = fork();
  if (child == 0) {
    CHECK(engine.queue->Close(NowNs() + kAtOnce));
    engine.queue.reset();
    engine.pinned.reset();
    _exit(0);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
}

// The workers have gone when the device gets to the jobs: the callback does their work.
void TestNoWorkers() {
  Fake::Get().stream_memory(false);
  SettlesAt({});  // What the tests before have left.
  Engine host(false, ShapeOf(0));
  CHECK(host.Run(AProgram()).ok() && host.WaitStores());
  const FakeCudaLive before = Fake::Get().live();
  {
    Engine engine(true, ShapeOf(0));
    Fake::Get().hold(1);
    CHECK(engine.Run(AProgram()).ok());
    Workers::Get().Stop();
    Fake::Get().hold(0);
    engine.Wait();
    CHECK(engine.SameResults(host, AProgram()));
    const std::vector<StepTiming> timings = engine.queue->DrainTimings();
    CHECK(timings.size() == 1 && timings[0].cpu_ns > 0);
    CHECK(engine.WaitStores() && engine.SamePools(host));
  }
  CHECK(BecomesLive(before));
}

}  // namespace
}  // namespace wscope

int main() {
  wscope::EnterContext();
  wscope::Workers::Get().Start(2);
  wscope::TestFork();
  for (const bool stream_memory : {true, false}) {
    wscope::Fake::Get().stream_memory(stream_memory);
    wscope::TestDelayedStore();
    wscope::TestLetGo();
    wscope::TestOpenJobs(true);
    wscope::TestOpenJobs(false);
  }
  // These leave things that go later, or never.
  for (const bool stream_memory : {true, false}) {
    wscope::Fake::Get().stream_memory(stream_memory);
    wscope::TestLost();
    wscope::TestHangingStream(true);
    wscope::TestHangingStream(false);
  }
  wscope::TestNoWorkers();
}
