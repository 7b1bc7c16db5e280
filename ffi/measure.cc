#include "measure.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#include "clock.h"
#include "dispatch.h"
#include "host_job.h"
#include "job_memory.h"
#include "link_copies.h"
#include "pack.h"
#include "workers.h"

namespace wscope {
namespace {

constexpr int kReadParts = 8;  // Of a worker: those of unequal speed end together.

void Submit(const std::shared_ptr<Task>& task) {
  if (!Workers::Get().Submit(task)) {
    throw std::runtime_error("measure: there are no workers; call start_workers first");
  }
}

Measured RunParts(int num_parts, const std::function<void(int)>& run) {
  std::atomic<int64_t> cpu_ns{0};
  const auto task = std::make_shared<Task>(num_parts, [&](int part) {
    const int64_t start = ThreadCpuNs();
    run(part);
    cpu_ns += ThreadCpuNs() - start;
  });
  Submit(task);
  task->Wait();
  return {task->end_ns() - task->start_ns(), cpu_ns.load()};
}

// The workers read their parts of every layer until `until_ns`; `bytes` gets what they read.
std::shared_ptr<Task> MakeReaders(const Pool& pool, const Kernel& kernel, int64_t until_ns,
                                  std::atomic<int64_t>* bytes) {
  constexpr int64_t kPiece = int64_t{1} << 20;
  const int workers = std::max(1, Workers::Get().num_workers());
  return std::make_shared<Task>(workers, [=, &pool, &kernel](int part) {
    const int64_t from = pool.committed_bytes() * part / workers / 256 * 256;
    const int64_t to = pool.committed_bytes() * (part + 1) / workers / 256 * 256;
    int64_t read = 0, now = NowNs();
    for (int layer = 0; now < until_ns; layer = (layer + 1) % pool.num_layers()) {
      now = NowNs();
      for (int64_t at = from; at < to && now < until_ns; now = NowNs()) {
        const int64_t size = std::min(kPiece, to - at);
        kernel.read(pool.Block(layer, 0) + at, size, kOwnPrefetch);
        read += size;
        at += size;
      }
    }
    *bytes += read;
  });
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

Measured MeasureRows(const AttentionShape& shape, const Pool& pool, int layer, int num_slots,
                     const Kernel& chosen) {
  const HeadShape head = HeadOf(shape);
  const Kernel& kernel = Resolve(chosen, head);
  const auto item_bytes = static_cast<int>(ItemBytes(shape.storage));
  const PackShape rows{1,           shape.key_dim, shape.value_in_key ? 0 : shape.value_dim,
                       shape.block, item_bytes,    true};
  const std::vector<float> q(int64_t{shape.group()} * shape.key_dim, 0.25f);
  const int64_t items = int64_t{num_slots} * shape.num_kv_heads;
  const int parts = kReadParts * std::max(1, Workers::Get().num_workers());
  return RunParts(parts, [&](int part) {
    const int64_t packed_bytes = WholeLines(shape.head_bytes());
    const int64_t kernel_bytes = WholeLines(kernel.scratch_bytes(head));
    uint8_t* const packed =
        ThreadMemory(packed_bytes + kernel_bytes + shape.state_size() * sizeof(float));
    if (packed == nullptr) return;
    const SoftmaxState state =
        StateAt(shape, reinterpret_cast<float*>(packed + packed_bytes + kernel_bytes));
    ClearState(head, state);
    const uint8_t* const block = packed;
    const HeadBlocks blocks{&block, 1, 0, nullptr, 0};
    for (int64_t item = items * part / parts; item < items * (part + 1) / parts; ++item) {
      const uint8_t* const key = pool.Block(layer, 0) + item * shape.head_bytes();
      const uint8_t* const value = key + int64_t{shape.block} * shape.key_dim * item_bytes;
      PackBlocks(rows, 1, key, shape.value_in_key ? nullptr : value, packed);
      kernel.attend(head, q.data(), blocks, packed + packed_bytes, state);
    }
  });
}

Measured MeasureRead(const Pool& pool, int layer, int num_slots, const Kernel& kernel,
                     int64_t prefetch_bytes) {
  const int64_t bytes = num_slots * pool.block_bytes();
  const uint8_t* const begin = pool.Block(layer, 0);
  const int parts = kReadParts * std::max(1, Workers::Get().num_workers());
  return RunParts(parts, [&](int part) {
    const int64_t from = bytes * part / parts / 256 * 256;
    const int64_t to = bytes * (part + 1) / parts / 256 * 256;
    kernel.read(begin + from, to - from, prefetch_bytes);
  });
}

Rates MeasureStreams(const Pool* read, const Kernel& kernel, const Pool* link,
                     std::optional<int> device, int64_t chunk_bytes, int64_t duration_ns,
                     std::optional<double> link_rate) {
  // Before the readers start: it may need the workers.
  const std::unique_ptr<Link> copies = link ? MakeLink(device, chunk_bytes) : nullptr;
  const int64_t until_ns = NowNs() + duration_ns;
  std::atomic<int64_t> bytes{0};
  std::shared_ptr<Task> readers;
  if (read) {
    readers = MakeReaders(*read, kernel, until_ns, &bytes);
    Submit(readers);
  }
  Rates rates{0.0, 0.0};
  std::exception_ptr failed;
  try {
    if (copies) rates.link = copies->Run(*link, link_rate, until_ns);
  } catch (...) {
    failed = std::current_exception();  // The readers use what lives here.
  }
  if (readers) {
    readers->Wait();
    const int64_t took = readers->end_ns() - readers->start_ns();
    rates.read = took > 0 ? 1e9 * bytes / took : 0.0;
  }
  if (failed) std::rethrow_exception(failed);
  return rates;
}

}  // namespace wscope
