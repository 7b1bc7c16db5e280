// Armed tasks: each runs once after its flag is up, or is dropped; who waits costs one core.
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"
#include "clock.h"
#include "workers.h"

namespace wscope {
namespace {

constexpr int64_t kSoon = 60'000'000'000;

void SleepUs(int us) { std::this_thread::sleep_for(std::chrono::microseconds(us)); }

// A task with its flag, and what became of it. On the heap: a look at the flag after the task is
// done is found by the address sanitizer.
struct Watched {
  explicit Watched(int num_parts, int part_us = 0)
      : task(std::make_shared<Task>(
            num_parts,
            [this, part_us](int) {
              CHECK(flag == 1);
              if (part_us > 0) SleepUs(part_us);
              ++parts;
            },
            [this] { ended = true; }, [this] { dropped = true; })) {}
  // A task that is not done may still read `flag` and write `parts`.
  ~Watched() { CHECK(!armed || task->done()); }

  void Arm() {
    armed = Workers::Get().Arm(task, &flag);
    CHECK(armed);
  }
  void Raise() { flag.store(1, std::memory_order_release); }
  void Disarm() { Workers::Get().Disarm(task); }
  void Wait() { CHECK(task->WaitUntil(NowNs() + kSoon)); }

  Flag flag{0};
  bool armed = false;
  std::atomic<int> parts{0};
  std::atomic<bool> ended{false}, dropped{false};
  const std::shared_ptr<Task> task;
};

// The flags go up at random, before and after the workers have gone to sleep.
void TestFlags(int workers) {
  Workers::Get().Start(workers);
  for (const int pause_us : {0, 10, 100, 2000}) {
    for (int round = 0; round < 20; ++round) {
      std::vector<std::unique_ptr<Watched>> all;
      for (int i = 0; i < 4; ++i) {
        all.push_back(std::make_unique<Watched>(1 + (round + i) % 5));
        all.back()->Arm();
      }
      for (const int i : {1, 0, 3, 2}) {
        SleepUs(pause_us);
        CHECK(all[i]->parts == 0);
        all[i]->Raise();
        if (round % 2 == 0) all[i]->Wait();
      }
      for (int i = 0; i < 4; ++i) {
        all[i]->Wait();
        CHECK(all[i]->parts == 1 + (round + i) % 5 && all[i]->ended && !all[i]->dropped);
        CHECK(all[i]->task->end_ns() >= all[i]->task->start_ns());
      }
    }
  }
}

// Of tasks whose flags are up the first armed goes first.
void TestOrder() {
  Workers::Get().Start(1);
  Watched first(1, 20'000);
  first.Arm();
  first.Raise();
  while (first.task->start_ns() == 0) SleepUs(10);
  std::vector<int> order;
  std::vector<std::unique_ptr<Flag>> flags;
  std::vector<std::shared_ptr<Task>> tasks;
  for (int i = 0; i < 5; ++i) {
    flags.push_back(std::make_unique<Flag>(0));
    tasks.push_back(std::make_shared<Task>(1, [&order, i](int) { order.push_back(i); }));
    CHECK(Workers::Get().Arm(tasks.back(), flags.back().get()));
  }
  for (int i = 4; i >= 0; --i) flags[i]->store(1);
  for (const auto& task : tasks) task->Wait();
  for (int i = 0; i < 5; ++i) CHECK(order[i] == i);
}

// What is not armed is done meanwhile, by the one worker that there is.
void TestOthersMeanwhile(int workers) {
  Workers::Get().Start(workers);
  Watched armed(2);
  armed.Arm();
  for (int i = 0; i < 20; ++i) {
    const auto task = std::make_shared<Task>(3, [](int) {});
    CHECK(Workers::Get().Submit(task));
    CHECK(task->WaitUntil(NowNs() + kSoon));
    SleepUs(i * 20);
  }
  CHECK(!armed.task->done());
  armed.Raise();
  armed.Wait();
}

// Workers that wait fetch what their own part of the first task will read, each piece once; the
// functor goes when the task is done and nobody is in it.
void TestApproach(int workers) {
  Workers::Get().Start(workers);
  Watched before(workers, 20'000);
  Flag flag{0};
  std::atomic<int> parts{0}, calls{0}, later{0};
  std::vector<std::atomic<int>> next(workers);
  auto token = std::make_shared<int>(0);
  const std::weak_ptr<int> held = token;
  auto approach = [&, token = std::move(token)](int part, int step) {
    CHECK(part < workers && next[part].fetch_add(1) == step && step < 3);
    ++calls;
    return step < 2;
  };
  const auto task =
      std::make_shared<Task>(workers, [&](int) { ++parts; }, [] {}, [] {}, std::move(approach));
  const auto last =
      std::make_shared<Task>(1, [](int) {}, [] {}, [] {}, [&](int, int) { return ++later < 100; });
  before.Arm();
  CHECK(Workers::Get().Arm(task, &flag));
  CHECK(Workers::Get().Arm(last, &flag));
  before.Raise();
  const int64_t deadline = NowNs() + kSoon;
  while (calls < 3 && NowNs() < deadline) SleepUs(100);
  CHECK(calls >= 3 && later == 0);  // One at least waits; others may sleep.
  flag.store(1);
  CHECK(task->WaitUntil(deadline) && last->WaitUntil(deadline));
  before.Wait();  // One worker may have been in it all the time.
  CHECK(parts == workers);
  while (!held.expired() && NowNs() < deadline) SleepUs(100);
  CHECK(held.expired());
}

// A worker mostly takes the part that it has approached: an eighth of the time would be chance.
void TestOwnPart() {
  constexpr int kWorkers = 8, kRounds = 20;
  Workers::Get().Start(kWorkers);
  std::vector<std::thread::id> before(kWorkers), now(kWorkers);
  int same = 0;
  for (int round = 0; round <= kRounds; ++round) {
    const auto task = std::make_shared<Task>(kWorkers, [&](int part) {
      now[part] = std::this_thread::get_id();
      SleepUs(10'000);
    });
    CHECK(Workers::Get().Submit(task));
    task->Wait();
    for (int part = 0; round > 0 && part < kWorkers; ++part) same += now[part] == before[part];
    before = now;
  }
  CHECK(same > kRounds * kWorkers / 2);
}

int64_t CpuNs() {
  timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

// CPU time of the process over the time that passes, for a while.
double Load() {
  const int64_t start = NowNs(), cpu = CpuNs();
  SleepUs(200'000);
  return static_cast<double>(CpuNs() - cpu) / static_cast<double>(NowNs() - start);
}

// An idle pool takes no time; one that waits for flags takes one core, not all.
void TestCost() {
  Workers::Get().Start(4);
  SleepUs(20'000);
  CHECK(Load() < 0.1);
  Watched armed(4);
  armed.Arm();
  SleepUs(20'000);
  CHECK(Load() < 1.3);
  armed.Raise();
  armed.Wait();
  SleepUs(20'000);
  CHECK(Load() < 0.1);
}

void TestDisarm() {
  Workers::Get().Start(2);
  for (int round = 0; round < 50; ++round) {
    auto kept = std::make_unique<Watched>(2);
    auto dropped = std::make_unique<Watched>(2);
    (round % 2 == 0 ? kept : dropped)->Arm();
    (round % 2 == 0 ? dropped : kept)->Arm();
    SleepUs(round % 5 * 50);
    dropped->Disarm();
    CHECK(dropped->task->done() && dropped->dropped && !dropped->ended && dropped->parts == 0);
    CHECK(dropped->task->end_ns() == 0 && dropped->task->start_ns() == 0);
    dropped->Disarm();
    dropped.reset();  // Nobody looks at its flag.
    kept->Raise();
    kept->Wait();
    kept->Disarm();
    CHECK(kept->parts == 2 && kept->ended && !kept->dropped);
  }
}

// Several threads arm; flags go up and tasks are disarmed at the same time.
void TestStress(int workers) {
  Workers::Get().Start(workers);
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 3; ++seed) {
    threads.emplace_back([seed] {
      std::mt19937 random(seed);
      std::vector<std::unique_ptr<Watched>> open;
      for (int i = 0; i < 300; ++i) {
        open.push_back(std::make_unique<Watched>(1 + int(random() % 4)));
        open.back()->Arm();
        if (random() % 3 == 0) SleepUs(int(random() % 300));
        if (open.size() < 3) continue;
        const std::unique_ptr<Watched> one = std::move(open[random() % 3]);
        open.erase(std::find(open.begin(), open.end(), nullptr));
        const int choice = int(random() % 3);
        if (choice > 0) one->Raise();
        if (choice < 2) one->Disarm();
        one->Wait();
        CHECK(one->ended != one->dropped && (one->parts > 0) == one->ended);
      }
      for (const auto& one : open) one->Disarm();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void TestResize() {
  Workers::Get().Start(2);
  Watched armed(1);
  armed.Arm();
  CHECK(Throws<std::runtime_error>([] { Workers::Get().Start(3); }, "1 job(s) are open"));
  armed.Disarm();
  Workers::Get().Start(3);
  CHECK(Workers::Get().num_workers() == 3);
}

// A task whose flag is up is run, others are dropped; nothing new is taken.
void TestStop() {
  std::vector<std::unique_ptr<Watched>> all;
  for (int i = 0; i < 6; ++i) {
    all.push_back(std::make_unique<Watched>(2, 500));
    if (i % 2 == 0) all.back()->Raise();
    all.back()->Arm();
  }
  Workers::Get().Stop();
  for (int i = 0; i < 6; ++i) {
    CHECK(all[i]->task->done() && all[i]->ended == (i % 2 == 0) && all[i]->dropped == (i % 2 != 0));
  }
  Watched late(1);
  CHECK(!Workers::Get().Arm(late.task, &late.flag));
}

}  // namespace
}  // namespace wscope

int main() {
  using wscope::Workers;
  wscope::Watched none(1);
  CHECK(!Workers::Get().Arm(none.task, &none.flag));
  for (const int workers : {1, 2, 4}) {
    wscope::TestFlags(workers);
    wscope::TestOthersMeanwhile(workers);
    wscope::TestApproach(workers);
    wscope::TestStress(workers);
  }
  wscope::TestOrder();
  wscope::TestOwnPart();
  wscope::TestCost();
  wscope::TestDisarm();
  wscope::TestResize();
  wscope::TestStop();
}
