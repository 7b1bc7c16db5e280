// A job on the workers: right for every number of parts and layer, repeatable bit by bit, many at a
// time.
#include "host_job.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "cases.h"
#include "check.h"
#include "dispatch.h"
#include "workers.h"

namespace wscope {
namespace {

std::shared_ptr<RowBlocks> RowsOf(const CaseData& data) {
  return std::make_shared<RowBlocks>(data.pool.get(), data.num_rows, data.row_ptr.data(),
                                     data.table.data());
}

std::shared_ptr<HostJob> MakeJob(const CaseData& data, int workers) {
  auto job = std::make_shared<HostJob>(data.shape, data.pool, 0, RowsOf(data), workers);
  job->BindCopy(data.q.data(), Storage::kFloat32);
  return job;
}

void RunHere(HostJob& job) {
  for (int part = job.num_parts() - 1; part >= 0; --part) job.RunPart(part);
  job.Finish();
}

std::shared_ptr<Task> RunOnWorkers(const std::shared_ptr<HostJob>& job) {
  if (job->num_parts() == 0) return nullptr;
  std::shared_ptr<Task> task = MakeTask(job);
  CHECK(Workers::Get().Submit(task));
  return task;
}

bool SameBits(const HostJob& a, const HostJob& b) {
  return std::memcmp(a.o(), b.o(), a.o_size() * sizeof(float)) == 0 &&
         std::memcmp(a.lse(), b.lse(), a.lse_size() * sizeof(float)) == 0;
}

void CheckResult(const Case& test, const HostJob& job, const Expected& expected) {
  const bool exact = KernelFor(HeadOf(test.shape)).exact;
  CHECK(MaxError(job.o(), expected.o) <= Tolerance(test) + (exact ? 0.0 : kRoundedO));
  CHECK(MaxError(job.lse(), expected.lse) <= Tolerance(test) + (exact ? 0.0 : 1e-4));
}

// Parts end anywhere: inside a head, at its end, in a row after empty ones.
void TestEveryCut(const Case& test) {
  const CaseData data(test);
  const Expected expected = Reference(data);
  for (const int workers : {1, 2, 3, 4, 5, 7, 8, 16, 61, 1000}) {
    const auto here = MakeJob(data, workers);
    CHECK(here->num_parts() <= HostJob::kMaxRounds * workers);
    CHECK(test.name != "large" || workers > 3 || here->num_parts() >= 4 * workers);
    RunHere(*here);
    CheckResult(test, *here, expected);
    const auto on_workers = MakeJob(data, workers);
    if (const auto task = RunOnWorkers(on_workers)) task->Wait();
    CHECK(SameBits(*here, *on_workers));
  }
}

// A head's states merge as they come; whatever the order, to the same bits.
void TestEveryOrder(const Case& test) {
  const CaseData data(test);
  for (const int workers : {2, 3, 8, 1000}) {
    const auto expected = MakeJob(data, workers);
    RunHere(*expected);
    std::vector<int> parts(expected->num_parts());
    std::iota(parts.begin(), parts.end(), 0);
    std::mt19937 random(workers);
    for (int round = 0; round < 8; ++round) {
      const auto job = MakeJob(data, workers);
      for (const int part : parts) job->RunPart(part);
      job->Finish();
      CHECK(SameBits(*job, *expected));
      std::shuffle(parts.begin(), parts.end(), random);
    }
  }
}

// What parts read first, by pieces: heads of the rows' blocks, one behind the other, and no more
// than there is.
void TestNear(const Case& test) {
  const CaseData data(test);
  const auto rows = RowsOf(data);
  const int64_t head_bytes = data.shape.head_bytes();
  const int64_t cache = std::max(int64_t{sysconf(_SC_LEVEL2_CACHE_SIZE)} / 4, int64_t{128} << 10);
  for (const int workers : {1, 3, 8, 1000}) {
    const HostJob job(data.shape, data.pool, 0, rows, workers);
    CHECK(job.Near(job.num_parts(), 0).count == 0);
    int64_t sum = 0;
    for (int part = 0; part < job.num_parts(); ++part) {
      HostJob::Bytes last{nullptr, 0};
      int64_t of_part = 0;
      for (int step = 0;; ++step) {
        const HostJob::Bytes near = job.Near(part, step);
        if (near.count == 0) break;
        CHECK((of_part += near.count) <= cache);
        const auto block = std::find_if(rows->blocks.begin(), rows->blocks.end(), [&](auto begin) {
          return begin <= near.begin && near.begin < begin + data.shape.block_bytes();
        });
        CHECK(block != rows->blocks.end());
        const int64_t in_head = (near.begin - *block) % head_bytes;
        CHECK(in_head + near.count <= head_bytes);
        if (step == 0) CHECK(in_head == 0);
        if (step == 0 && part == 0) CHECK(near.begin == rows->blocks[0]);
        if (in_head > 0) CHECK(near.begin == last.begin + last.count);
        last = near;
        sum += near.count;
      }
      CHECK(last.count > 0);
    }
    CHECK(sum <= job.num_blocks() * data.shape.block_bytes());
  }
}

// q in bfloat16, and q and the result in memory of somebody else's, give the bits of the same
// numbers in float32.
void TestBound(const Case& test) {
  const CaseData data(test);
  std::vector<uint16_t> halves;
  std::vector<float> floats;
  for (const float value : data.q) {
    halves.push_back(ToBfloat16(value));
    floats.push_back(FromBfloat16(halves.back()));
  }
  HostJob copied(data.shape, data.pool, 0, RowsOf(data), 5);
  copied.BindCopy(floats.data(), Storage::kFloat32);
  RunHere(copied);
  HostJob bound(data.shape, data.pool, 0, RowsOf(data), 5);
  std::vector<float> o(bound.o_size(), 7.0f), lse(bound.lse_size(), 7.0f);
  std::vector<uint16_t> late(halves.size());
  bound.Bind(late.data(), Storage::kBfloat16, o.data(), lse.data());
  late.assign(halves.begin(), halves.end());
  RunHere(bound);
  CHECK(bound.o() == o.data() && bound.lse() == lse.data() && SameBits(copied, bound));
}

// A layer's blocks are those of layer 0, further on.
void TestLayers() {
  const CaseData data(AllCases()[4]);
  const auto pool = std::make_shared<Pool>(3, data.pool->max_slots(), data.pool->block_bytes());
  pool->Commit(data.pool->committed());
  std::memcpy(pool->Block(2, 0), data.pool->Block(0, 0),
              data.pool->committed() * data.pool->block_bytes());
  const auto rows = std::make_shared<RowBlocks>(pool.get(), data.num_rows, data.row_ptr.data(),
                                                data.table.data());
  HostJob job(data.shape, pool, 2, rows, 4);
  job.BindCopy(data.q.data(), Storage::kFloat32);
  RunHere(job);
  const auto expected = MakeJob(data, 4);
  RunHere(*expected);
  CHECK(SameBits(job, *expected));
}

// A job on its way to the workers can be approached, and lets go of all when it is done.
void TestApproached(const Case& test) {
  const CaseData data(test);
  const auto job = MakeJob(data, 2);
  Flag flag{0};
  const auto task = MakeTask(job);
  CHECK(job.use_count() == 5);  // Here, and to run, finish, drop and approach.
  CHECK(Workers::Get().Arm(task, &flag));
  flag.store(1);
  task->Wait();
  while (job.use_count() > 1) std::this_thread::yield();
}

// Several jobs are open at a time, ended by other threads than those that started them.
void TestOpenJobs() {
  const std::vector<Case> cases = AllCases();
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 3; ++thread) {
    threads.emplace_back([&, thread] {
      const Case& test = cases[6 + thread];
      const CaseData data(test);
      const Expected expected = Reference(data);
      for (int round = 0; round < 20; ++round) {
        const auto first = MakeJob(data, 2);
        const auto second = MakeJob(data, 3);
        const auto first_task = RunOnWorkers(first);
        const auto second_task = RunOnWorkers(second);
        first_task->Wait();
        second_task->Wait();
        CheckResult(test, *first, expected);
        CheckResult(test, *second, expected);
        CHECK(first_task->end_ns() >= first_task->start_ns());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// The pool may be given up while a job reads it.
void TestPoolOutlives() {
  const Case test = AllCases()[0];
  auto data = std::make_unique<CaseData>(test);
  const Expected expected = Reference(*data);
  const auto job = MakeJob(*data, 4);
  const std::shared_ptr<Task> task = MakeTask(job, 20);
  CHECK(Workers::Get().Submit(task));
  data.reset();
  task->Wait();
  CheckResult(test, *job, expected);
}

}  // namespace
}  // namespace wscope

int main() {
  wscope::Workers::Get().Start(3);
  for (const wscope::Kernel* isa : wscope::AvailableKernels()) {
    wscope::ForceIsa(isa->name);
    for (const wscope::Case& test : wscope::AllCases()) {
      wscope::TestEveryCut(test);
      wscope::TestBound(test);
      wscope::TestEveryOrder(test);
    }
  }
  for (const wscope::Case& test : wscope::AllCases()) wscope::TestNear(test);
  wscope::ForceIsa("");
  wscope::TestLayers();
  wscope::TestApproached(wscope::AllCases().back());
  wscope::TestOpenJobs();
  wscope::TestPoolOutlives();
  wscope::Workers::Get().Stop();
}
