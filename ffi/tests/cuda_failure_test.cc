// Every call of the driver fails once: what comes is a status or the right result, nothing hangs,
// nothing is freed too early, nothing is left.
#include <cstdio>
#include <cstring>
#include <string>

#include "check.h"
#include "engine.h"
#include "workers.h"

namespace wscope {
namespace {

bool EndsWell(const Status& status, int error, Engine& engine, const Engine& host,
              const Program& program) {
  if (status.ok()) {
    if (!engine.SameResults(host, program)) return false;
    // A store that failed says so; else it is there.
    return engine.WaitStores() ? engine.SamePools(host) : engine.queue->Poison().has_value();
  }
  if (status.text.find("the NVIDIA driver says") == std::string::npos) return false;
  const auto kind = error == 2 ? Status::Kind::kResourceExhausted : Status::Kind::kInternal;
  // The mover's failure is found by the call after it.
  if (status.kind != kind && status.text.rfind("engine: an earlier store", 0) != 0) return false;
  // XLA's own failure is not ours to know.
  if (status.text.rfind("XLA", 0) == 0) return true;
  return engine.queue->Poison().has_value() && !engine.queue->Begin().ok();
}

// Returns the name of the call that failed; null: there are fewer than n.
const char* FailOnce(int n, int error, const Program& program, const Engine& host) {
  const FakeCudaLive before = Fake::Get().live();
  const char* failed = nullptr;
  {
    Engine engine(true, host.shape);
    Fake::Get().fail_at(n, error, false);
    const Status status = engine.Run(program);
    engine.Wait();
    if (!EndsWell(status, error, engine, host, program)) {
      std::fprintf(stderr, "call %d, %s, failed with %d: %s\n", n, Fake::Get().failed(), error,
                   status.text.c_str());
      CHECK(false);
    }
    if (status.text.rfind("XLA", 0) != 0) engine.FreeArrays();
    const auto end = [&] {
      engine.queue->DrainTimings();
      CHECK(engine.queue->Close(NowNs() + kSoon));
      engine.queue.reset();
    };
    n % 4 < 2 ? end() : Elsewhere(end);
    failed = Fake::Get().failed();
    Fake::Get().fail_at(0, 0, false);
  }
  if (failed != nullptr && std::strstr(failed, "cuCtx") != nullptr) {
    SettlesAt(before);  // A thing cannot be destroyed on a thread that does not get to its context.
  } else if (!BecomesLive(before)) {
    std::fprintf(stderr, "call %d, %s, failed with %d\n", n, failed, error);
    CHECK(false);
  }
  return failed;
}

// The seed is that of a step with jobs over blocks and over none, two open at a time, and with
// moves to both pools. Out of memory and another error come in turn.
void TestEveryCall(bool stream_memory) {
  Fake::Get().stream_memory(stream_memory);
  Engine host(false, ShapeOf(1));
  const Program program(14, 0);
  CHECK(host.Run(program).ok() && host.WaitStores());
  int n = 1;
  while (FailOnce(n, n % 2 == 0 ? 2 : 999, program, host) != nullptr) ++n;
  CHECK(n > 100);
}

}  // namespace
}  // namespace wscope

int main() {
  wscope::EnterContext();
  wscope::Workers::Get().Start(2);
  wscope::Fake::Get().delay_us(100);
  for (const bool stream_memory : {true, false}) wscope::TestEveryCall(stream_memory);
  wscope::Workers::Get().Stop();
}
