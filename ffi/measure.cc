#include "measure.h"

#include <time.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <stdexcept>
#include <vector>

#include "dispatch.h"
#include "host_job.h"
#include "workers.h"

namespace wscope {
namespace {

int64_t ThreadCpuNs() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

Measured RunParts(int num_parts, const std::function<void(int)>& run) {
  std::atomic<int64_t> longest{0};
  const auto task = std::make_shared<Task>(num_parts, [&](int part) {
    const int64_t start = ThreadCpuNs();
    run(part);
    const int64_t ns = ThreadCpuNs() - start;
    int64_t seen = longest.load();
    while (ns > seen && !longest.compare_exchange_weak(seen, ns)) {
    }
  });
  if (!Workers::Get().Submit(task)) {
    throw std::runtime_error("measure: there are no workers; call start_workers first");
  }
  task->Wait();
  return {task->end_ns() - task->start_ns(), longest.load()};
}

}  // namespace

Measured MeasureAttention(const AttentionShape& shape, const std::shared_ptr<Pool>& pool, int layer,
                          int num_rows, const int32_t* row_ptr, const int32_t* table,
                          const Kernel& kernel, int64_t prefetch_bytes) {
  const int workers = std::max(1, Workers::Get().num_workers());
  const HeadShape head_shape = HeadOf(shape);
  HostJob job(shape, pool, layer, std::make_shared<RowBlocks>(pool.get(), num_rows, row_ptr, table),
              workers, {&Resolve(kernel, head_shape), prefetch_bytes});
  std::vector<float> q;
  for (int64_t i = 0; i < job.q_size(); ++i) {
    q.push_back(0.5f - static_cast<float>(i * 2654435761u % 1024) / 1024.0f);
  }
  job.BindCopy(q.data(), Storage::kFloat32);
  const Measured measured = RunParts(job.num_parts(), [&](int part) { job.RunPart(part); });
  job.Finish();
  return measured;
}

Measured MeasureRead(const Pool& pool, int layer, int num_slots, const Kernel& kernel,
                     int64_t prefetch_bytes) {
  const int64_t bytes = num_slots * pool.block_bytes();
  const uint8_t* const begin = pool.Block(layer, 0);
  const int workers = std::max(1, Workers::Get().num_workers());
  return RunParts(workers, [&](int part) {
    const int64_t from = bytes * part / workers / 256 * 256;
    const int64_t to = bytes * (part + 1) / workers / 256 * 256;
    kernel.read(begin + from, to - from, prefetch_bytes);
  });
}

}  // namespace wscope
