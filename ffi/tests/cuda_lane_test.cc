// Steps behind streams: what they compute, load and store is bit for bit what the host gives.
#include "cuda_lane.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <thread>
#include <tuple>
#include <vector>

#include "check.h"
#include "clock.h"
#include "engine.h"
#include "workers.h"

namespace wscope {
namespace {

// Asks what Python asks while a step runs, from a thread without a context.
class Watcher {
 public:
  explicit Watcher(StepQueue& queue)
      : thread_([this, &queue] {
          while (!leaving_) {
            timings_ += queue.DrainTimings().size();
            CHECK(!queue.Poison());
            std::this_thread::sleep_for(std::chrono::microseconds(300));
          }
        }) {}
  ~Watcher() {
    leaving_ = true;
    thread_.join();
  }
  size_t timings() const { return timings_; }

 private:
  std::atomic<bool> leaving_{false};
  std::atomic<size_t> timings_{0};
  std::thread thread_;
};

void RunBoth(Engine& host, Engine& device, unsigned seed, int step) {
  const Program program(seed * 1000 + step, step % 2);
  CHECK(host.Run(program).ok());
  const Status status = device.Run(program);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.text.c_str());
  CHECK(status.ok());
  device.Wait();
  CHECK(device.SameResults(host, program));
  // A step may read what the one before has stored.
  CHECK(host.WaitStores() && device.WaitStores());
  CHECK(device.SamePools(host));
}

void TestSteps(unsigned seed, int steps, bool stream_memory, bool kernels) {
  Fake::Get().stream_memory(stream_memory);
  Fake::Get().kernels(kernels);
  const FakeCudaLive before = Fake::Get().live();
  {
    const int chunks = 2 + static_cast<int>(seed % 3);
    Engine host(false, ShapeOf(seed), chunks);
    Engine device(true, ShapeOf(seed), chunks);
    const Watcher watcher(*device.queue);
    for (int step = 0; step < steps; ++step) {
      Fake::Get().delay_us(step % 3 * 60);
      RunBoth(host, device, seed, step);
    }
    CHECK(Fake::Get().live().modules - before.modules == (kernels ? 1 : 0));
    // Staging is used again: what is alive does not grow with the steps.
    const FakeCudaLive now = Fake::Get().live();
    CHECK(now.streams - before.streams == (stream_memory ? 3 : 4));
    CHECK(now.pinned - before.pinned <= 3 * kLayers + 1 && now.device - before.device <= 12);
    CHECK(now.events - before.events <= 100);
    while (watcher.timings() < static_cast<size_t>(steps)) std::this_thread::yield();
    Elsewhere([&] { CHECK(device.queue->Close(NowNs() + kSoon)); });
  }
  CHECK(BecomesLive(before));
}

// Only rows without blocks: nothing runs on the host, and the device gets zeros and -inf.
void TestNoBlocks() {
  Engine engine(true, ShapeOf(0));
  Program program;
  program.row_ptr.assign(kRows + 1, 0);
  for (int layer = 0; layer < kLayers; ++layer) {
    program.jobs.insert(program.jobs.end(), {layer, 0, kRows});
    program.stores.insert(program.stores.end(), {layer, 0});
  }
  program.turns.assign(kLayers, 0);
  CHECK(engine.Run(program).ok());
  engine.Wait();
  for (int i = 0; i < kRows * 4; ++i) {
    CHECK(std::isinf(engine.Lse(0)[i]) && engine.Lse(0)[i] < 0.0f);
    for (int d = 0; d < 16; ++d) CHECK(engine.O(0)[16 * i + d] == 0.0f);
  }
  CHECK(engine.WaitStores());
}

// Loads alone; `counts` are the slots of the chunks.
Program LoadsOf(const Numbers& counts) {
  Program program;
  for (size_t i = 0; i < counts.size(); ++i) {
    const int layer = static_cast<int>(i) % kLayers;
    program.loads.insert(program.loads.end(), {layer, static_cast<int32_t>(i % 3), counts[i]});
  }
  return program;
}

void TestPump(const Numbers& counts) {
  Engine engine(true, ShapeOf(1));
  Fake::Get().delay_us(200);
  for (int round = 0; round < 3; ++round) {  // The numbers of a step's turns begin anew.
    const Program program = LoadsOf(counts);
    const int64_t began_ns = NowNs();
    engine.Push(program);
    CHECK(engine.queue->Begin().ok());
    for (size_t turn = 0; turn < counts.size(); ++turn) CHECK(engine.Load(turn).ok());
    CHECK(engine.queue->Idle());
    engine.Wait();
    for (size_t turn = 0; turn < counts.size(); ++turn) {
      const uint8_t* const chunk =
          engine.pinned->Block(program.loads[3 * turn], program.loads[3 * turn + 1]);
      CHECK(std::memcmp(engine.Seen(turn), chunk, counts[turn] * engine.shape.block_bytes()) == 0);
    }
    // The copies follow one another: no moment counts twice.
    const std::vector<StepTiming> timings = engine.queue->DrainTimings();
    CHECK(timings.size() == 1);
    const bool any = std::any_of(counts.begin(), counts.end(), [](int32_t n) { return n > 0; });
    CHECK((timings[0].link_ns > 0) == any && timings[0].link_ns <= NowNs() - began_ns);
  }
}

// A chunk that is too large is not begun ahead, and refused when its turn comes; the ones before
// are right.
void TestTooLarge() {
  Engine engine(true, ShapeOf(1), 3);
  const Program program = LoadsOf({4, 4, 4, kCapacity + 1, 4});
  engine.Push(program);
  CHECK(engine.queue->Begin().ok());
  for (size_t turn = 0; turn < 3; ++turn) CHECK(engine.Load(turn).ok());
  const Status status = engine.Load(3);
  CHECK(status.kind == Status::Kind::kInvalidArgument);
  CHECK(status.text.find("the plan's load has 5") != std::string::npos);
  engine.Wait();
  for (size_t turn = 0; turn < 3; ++turn) {
    const uint8_t* const chunk =
        engine.pinned->Block(program.loads[3 * turn], program.loads[3 * turn + 1]);
    CHECK(std::memcmp(engine.Seen(turn), chunk, 4 * engine.shape.block_bytes()) == 0);
  }
  engine.FreeArrays();
}

// A copy that lay behind others' has taken that time too: from the later of what it waited for.
void TestFillingTime() {
  cuda::OwnStream stream;
  cuda::EventPool pool;
  CHECK(stream.Make().ok());
  std::vector<std::shared_ptr<cuda::Event>> events;
  for (int i = 0; i < 3; ++i) {
    events.push_back(pool.Take());
    CHECK(events.back()->Record(stream.get()).ok());
    CHECK(cuda::GetDriver()->StreamSynchronize(stream.get()) == 0);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  const auto& [first, second, ended] = std::tie(events[0], events[1], events[2]);
  const int64_t whole = ended->Since(*first), late = ended->Since(*second);
  CHECK(late >= 4'000'000 && whole >= late + 4'000'000);
  CHECK((CudaLane::Filling{first, ended, second}.took_ns() == late));
  CHECK((CudaLane::Filling{second, ended, first}.took_ns() == late));
  CHECK((CudaLane::Filling{first, ended, nullptr}.took_ns() == whole));
  CHECK((CudaLane::Filling{first, ended, second}.idle_ns() == 0));
  CHECK((CudaLane::Filling{second, ended, first}.idle_ns() == second->Since(*first)));
  CHECK((CudaLane::Filling{first, ended, nullptr}.idle_ns() == 0));
}

// A failing load: XLA has its buffers back when the call returns, whatever was on its way.
void TestMoved(int other_count, int other_capacity, bool other_place) {
  Engine engine(true, ShapeOf(1), 3);
  Fake::Get().delay_us(5000);
  engine.Push(LoadsOf({4, 4, 4}));
  CHECK(engine.queue->Begin().ok() && engine.Load(0).ok());
  ChunkSlots slots = engine.Slots();
  slots.count += other_count;
  slots.capacity += other_capacity;
  if (other_place) slots.begin = engine.Seen(0);
  const Status status =
      engine.Call([&](Carrier& carrier) { return engine.queue->Load(slots, carrier); });
  CHECK(status.kind == Status::Kind::kInternal);
  CHECK(status.text.find("slots have moved") != std::string::npos);
  engine.Wait();
  engine.FreeArrays();
}

// The prefetch of the next chunk is under way when something else fails.
void TestOtherFailure() {
  Engine engine(true, ShapeOf(1));
  Fake::Get().delay_us(5000);
  engine.Push(LoadsOf({4, 4, 4}));
  CHECK(engine.queue->Begin().ok() && engine.Load(0).ok());
  const Status status = engine.Call([&](Carrier&) { return engine.queue->Begin(); });
  CHECK(status.kind == Status::Kind::kFailedPrecondition);
  engine.Wait();
  engine.FreeArrays();
}

}  // namespace
}  // namespace wscope

int main() {
  using wscope::Numbers;
  wscope::EnterContext();
  wscope::Workers::Get().Start(2);
  for (const bool stream_memory : {false, true}) {
    wscope::TestSteps(0, 100, stream_memory, true);
    for (unsigned seed = 1; seed < 12; ++seed) {
      wscope::TestSteps(seed, 12, stream_memory, seed % 3 > 0);
    }
  }
  wscope::Fake::Get().kernels(true);
  wscope::TestNoBlocks();
  for (const Numbers& counts : {Numbers{4}, Numbers{0}, Numbers{3, 4}, Numbers{4, 0, 0},
                                Numbers{4, 4, 4, 4}, Numbers{1, 4, 2, 3, 4, 0, 4}}) {
    wscope::TestPump(counts);
  }
  wscope::Fake::Get().delay_us(0);
  wscope::TestFillingTime();
  wscope::TestTooLarge();
  wscope::TestMoved(0, 0, true);
  wscope::TestMoved(0, 1, false);
  wscope::TestMoved(-1, 0, false);
  wscope::TestOtherFailure();
  wscope::Workers::Get().Stop();
}
