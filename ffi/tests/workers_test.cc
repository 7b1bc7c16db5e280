// The worker pool: every part once, first in first out, several tasks open, resizing, forks.
#include "workers.h"

#include <dirent.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "clock.h"

namespace wscope {
namespace {

void SleepUs(int us) { std::this_thread::sleep_for(std::chrono::microseconds(us)); }

void TestNoWorkers() {
  CHECK(Workers::Get().num_workers() == 0);
  CHECK(!Workers::Get().Submit(std::make_shared<Task>(1, [](int) {})));
  CHECK(Throws<std::invalid_argument>([] { Workers::Get().Start(0); }, "n is 0"));
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;  // Sanitizers cannot live with little address space.
#else
constexpr bool kSanitized = false;
#endif

// Leaves this process so many bytes of address space beyond what it has.
void LimitAddressSpace(int64_t extra) {
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const rlim_t bytes = static_cast<rlim_t>(pages * sysconf(_SC_PAGESIZE) + extra);
  const rlimit limit{bytes, bytes};
  CHECK(setrlimit(RLIMIT_AS, &limit) == 0);
}

// True if `body` in a child, whose pool of workers is a new one, returns true.
template <typename Body>
bool InChild(const Body& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body() ? 0 : 1);
  int status = -1;
  return waitpid(child, &status, 0) == child && status == 0;
}

// The system refuses threads: the pool is smaller, or there is none and that is said. Must run
// before this process has workers.
void TestRefusedThreads() {
  if (kSanitized) return;
  CHECK(InChild([] {
    LimitAddressSpace(int64_t{100} << 20);  // Room for some stacks of 8 MiB.
    Workers::Get().Start(1000);
    const int workers = Workers::Get().num_workers();
    std::atomic<int> runs{0};
    const auto task = std::make_shared<Task>(20, [&](int) { ++runs; });
    if (!Workers::Get().Submit(task)) return false;
    task->Wait();
    Workers::Get().Stop();
    return workers >= 1 && workers < 1000 && runs == 20;
  }));
  CHECK(InChild([] {
    LimitAddressSpace(int64_t{1} << 20);
    return Throws<std::runtime_error>([] { Workers::Get().Start(2); },
                                      "refuses to start a thread") &&
           Workers::Get().num_workers() == 0;
  }));
}

void TestParts() {
  Workers::Get().Start(3);
  CHECK(Workers::Get().num_workers() == 3);
  for (const int num_parts : {1, 2, 3, 50}) {
    std::vector<std::atomic<int>> runs(num_parts);
    std::atomic<int> finished{0};
    const auto task = std::make_shared<Task>(
        num_parts, [&](int part) { ++runs[part]; },
        [&] {
          for (const auto& count : runs) CHECK(count == 1);
          ++finished;
        });
    CHECK(Workers::Get().Submit(task));
    task->Wait();
    CHECK(task->done() && finished == 1);
    CHECK(task->end_ns() >= task->start_ns() && task->start_ns() > 0);
  }
}

// Random delays, pauses long enough for the workers to sleep, several submitters.
void TestStress() {
  Workers::Get().Start(4);
  std::vector<std::thread> submitters;
  for (unsigned seed = 0; seed < 3; ++seed) {
    submitters.emplace_back([seed] {
      std::mt19937 random(seed);
      std::vector<std::pair<std::shared_ptr<Task>, std::shared_ptr<std::atomic<int>>>> open;
      for (int i = 0; i < 200; ++i) {
        const auto sum = std::make_shared<std::atomic<int>>(0);
        const int num_parts = 1 + int(random() % 9);
        const int delay_us = random() % 4 == 0 ? int(random() % 200) : 0;
        auto task = std::make_shared<Task>(num_parts, [sum, delay_us](int) {
          if (delay_us > 0) SleepUs(delay_us);
          ++*sum;
        });
        CHECK(Workers::Get().Submit(task));
        open.emplace_back(std::move(task), sum);
        if (random() % 3 == 0) SleepUs(int(random() % 150));
        if (open.size() < 4) continue;
        open.front().first->Wait();
        CHECK(*open.front().second >= 1);
        open.erase(open.begin());
      }
      for (auto& [task, sum] : open) task->Wait();
    });
  }
  for (std::thread& submitter : submitters) submitter.join();
}

void TestFirstInFirstOut() {
  Workers::Get().Start(1);
  std::vector<int> order;
  std::vector<std::shared_ptr<Task>> tasks;
  for (int i = 0; i < 20; ++i) {
    tasks.push_back(std::make_shared<Task>(2, [&order, i](int part) {
      order.push_back(2 * i + part);
      SleepUs(100);
    }));
    CHECK(Workers::Get().Submit(tasks.back()));
  }
  for (const auto& task : tasks) task->Wait();
  for (int i = 0; i < 40; ++i) CHECK(order[i] == i);
}

void TestResize() {
  Workers::Get().Start(2);
  Workers::Get().Start(2);
  std::atomic<bool> go{false};
  const auto task = std::make_shared<Task>(1, [&](int) {
    while (!go) SleepUs(100);
  });
  CHECK(Workers::Get().Submit(task));
  CHECK(Throws<std::runtime_error>([] { Workers::Get().Start(3); }, "1 job(s) are open"));
  CHECK(!task->WaitUntil(NowNs() + 1'000'000));
  go = true;
  CHECK(task->WaitUntil(NowNs() + 10'000'000'000));
  Workers::Get().Start(3);
  CHECK(Workers::Get().num_workers() == 3);
}

// How many threads of this process have a name that begins with `prefix`.
int CountThreads(const std::string& prefix) {
  int count = 0;
  DIR* const tasks = opendir("/proc/self/task");
  while (const dirent* entry = readdir(tasks)) {
    std::ifstream file("/proc/self/task/" + std::string(entry->d_name) + "/comm");
    std::string name;
    if (std::getline(file, name) && name.rfind(prefix, 0) == 0) ++count;
  }
  closedir(tasks);
  return count;
}

void TestNames() {
  Workers::Get().Start(2);
  const auto both = std::make_shared<Task>(2, [](int) { SleepUs(20'000); });
  CHECK(Workers::Get().Submit(both));
  both->Wait();
  CHECK(CountThreads("wscope-w") == 2);
}

void TestFork() {
  CHECK(InChild([] {
    const bool good = Throws<std::runtime_error>([] { Workers::Get().Start(2); }, "fork") &&
                      Throws<std::runtime_error>([] { Workers::Get().Start(5); }, "fork") &&
                      !Workers::Get().Submit(std::make_shared<Task>(1, [](int) {}));
    Workers::Get().Stop();
    return good;
  }));
}

// What was submitted is done; nothing new is taken.
void TestStop() {
  std::atomic<int> runs{0};
  std::vector<std::shared_ptr<Task>> tasks;
  for (int i = 0; i < 10; ++i) {
    tasks.push_back(std::make_shared<Task>(3, [&](int) {
      SleepUs(200);
      ++runs;
    }));
    CHECK(Workers::Get().Submit(tasks.back()));
  }
  Workers::Get().Stop();
  CHECK(runs == 30);
  for (const auto& task : tasks) CHECK(task->done());
  CHECK(!Workers::Get().Submit(std::make_shared<Task>(1, [](int) {})));
  CHECK(Throws<std::runtime_error>([] { Workers::Get().Start(1); }, "ending"));
  Workers::Get().Stop();
}

}  // namespace
}  // namespace wscope

int main() {
  wscope::TestRefusedThreads();
  wscope::TestNoWorkers();
  wscope::TestParts();
  wscope::TestStress();
  wscope::TestFirstInFirstOut();
  wscope::TestResize();
  wscope::TestNames();
  wscope::TestFork();
  wscope::TestStop();
}
