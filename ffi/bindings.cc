// The Python module wscope_jax._ffi. What each name does is written in _ffi.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "attention.h"
#include "calibrate.h"
#include "clock.h"
#include "cuda_driver.h"
#include "dispatch.h"
#include "handlers.h"
#include "handles.h"
#include "measure.h"
#include "pool.h"
#include "step_queue.h"
#include "workers.h"

namespace wscope {
namespace {

Storage ReadStorage(const std::string& name) {
  if (name == "float32") return Storage::kFloat32;
  if (name == "bfloat16") return Storage::kBfloat16;
  throw std::invalid_argument("storage: is \"" + name + "\", must be \"float32\" or \"bfloat16\"");
}

AttentionShape MakeShape(int num_q_heads, int num_kv_heads, int key_dim, int value_dim,
                         bool value_in_key, int block, const std::string& storage) {
  const AttentionShape shape{num_q_heads,
                             num_kv_heads,
                             key_dim,
                             value_dim,
                             value_in_key,
                             block,
                             ReadStorage(storage),
                             1.0f / std::sqrt(float(std::max(1, key_dim)))};
  if (const std::string wrong = CheckShape(shape); !wrong.empty()) {
    throw std::invalid_argument(wrong);
  }
  return shape;
}

double PyTimeAttention(int num_q_heads, int num_kv_heads, int key_dim, int value_dim,
                       bool value_in_key, int block, const std::string& storage, int num_blocks) {
  const AttentionShape shape =
      MakeShape(num_q_heads, num_kv_heads, key_dim, value_dim, value_in_key, block, storage);
  const nb::gil_scoped_release release;
  return static_cast<double>(TimeAttention(shape, num_blocks));
}

std::string PyIsaOf(int num_q_heads, int num_kv_heads, int key_dim, int value_dim,
                    bool value_in_key, int block, const std::string& storage) {
  const AttentionShape shape =
      MakeShape(num_q_heads, num_kv_heads, key_dim, value_dim, value_in_key, block, storage);
  const nb::gil_scoped_release release;
  return KernelFor(HeadOf(shape)).name;
}

const Kernel& ReadIsa(const std::string& name) {
  const Kernel* const kernel = FindKernel(name);
  if (!kernel) throw std::invalid_argument("isa: \"" + name + "\" is not among those of isas()");
  return *kernel;
}

using Times = std::pair<int64_t, int64_t>;

// A pool that has the layer and, committed, so many slots.
std::shared_ptr<Pool> RequireSlots(const PoolHandle& pool, int layer, int num_slots) {
  std::shared_ptr<Pool> held = pool.pool();
  if (layer < 0 || layer >= held->num_layers() || num_slots < 0 || num_slots > held->committed()) {
    throw std::invalid_argument("pool: has no such layer or slots");
  }
  return held;
}

void RequirePrefetch(int64_t prefetch_bytes) {
  if (prefetch_bytes < 0 && prefetch_bytes != kOwnPrefetch) {
    throw std::invalid_argument("prefetch_bytes: is " + std::to_string(prefetch_bytes) +
                                ", must be -1 (the kernel's own) or not negative");
  }
}

void RequireBlocks(const Pool& pool, const AttentionShape& shape) {
  if (shape.block_bytes() != pool.block_bytes()) {
    throw std::invalid_argument("pool: has blocks of another size");
  }
}

Times PyMeasureAttention(const PoolHandle& pool, int layer, const Int32Matrix& table,
                         int num_q_heads, int num_kv_heads, int key_dim, int value_dim,
                         bool value_in_key, int block, const std::string& storage,
                         const std::string& isa, int64_t prefetch_bytes) {
  const AttentionShape shape =
      MakeShape(num_q_heads, num_kv_heads, key_dim, value_dim, value_in_key, block, storage);
  const std::shared_ptr<Pool> held = RequireSlots(pool, layer, 0);
  RequireBlocks(*held, shape);
  RequirePrefetch(prefetch_bytes);
  const auto rows = static_cast<int>(table.shape(0));
  const auto blocks = static_cast<int32_t>(table.shape(1));
  if (table.size() == 0) throw std::invalid_argument("table: has no slot");
  for (int64_t i = 0; i < int64_t{rows} * blocks; ++i) {
    if (table.data()[i] < 0 || table.data()[i] >= held->committed()) {
      throw std::invalid_argument("table: names a slot that is not committed");
    }
  }
  std::vector<int32_t> row_ptr;
  for (int row = 0; row <= rows; ++row) row_ptr.push_back(row * blocks);
  const Kernel& kernel = ReadIsa(isa);
  const nb::gil_scoped_release release;
  const Measured times = MeasureAttention(shape, held, layer, rows, row_ptr.data(), table.data(),
                                          kernel, prefetch_bytes);
  return {times.wall_ns, times.cpu_ns};
}

Times PyMeasureRows(const PoolHandle& pool, int layer, int num_slots, int num_q_heads,
                    int num_kv_heads, int key_dim, int value_dim, bool value_in_key, int block,
                    const std::string& storage, const std::string& isa) {
  const AttentionShape shape =
      MakeShape(num_q_heads, num_kv_heads, key_dim, value_dim, value_in_key, block, storage);
  const std::shared_ptr<Pool> held = RequireSlots(pool, layer, num_slots);
  RequireBlocks(*held, shape);
  const Kernel& kernel = ReadIsa(isa);
  const nb::gil_scoped_release release;
  const Measured times = MeasureRows(shape, *held, layer, num_slots, kernel);
  return {times.wall_ns, times.cpu_ns};
}

Times PyMeasureRead(const PoolHandle& pool, int layer, int num_slots, const std::string& isa,
                    int64_t prefetch_bytes) {
  const std::shared_ptr<Pool> held = RequireSlots(pool, layer, num_slots);
  RequirePrefetch(prefetch_bytes);
  const Kernel& kernel = ReadIsa(isa);
  const nb::gil_scoped_release release;
  const Measured times = MeasureRead(*held, layer, num_slots, kernel, prefetch_bytes);
  return {times.wall_ns, times.cpu_ns};
}

std::pair<double, double> PyMeasureStreams(const PoolHandle* read, const PoolHandle* link,
                                           int64_t chunk_bytes, double seconds,
                                           const std::string& isa, std::optional<int> device,
                                           std::optional<double> link_rate) {
  const std::shared_ptr<Pool> read_pool = read ? read->pool() : nullptr;
  const std::shared_ptr<Pool> link_pool = link ? link->pool() : nullptr;
  for (const auto& pool : {read_pool, link_pool}) {
    if (pool && pool->committed() == 0) throw std::invalid_argument("pool: has no committed slot");
  }
  if (link_pool && device && !link_pool->is_pinned()) {
    throw std::invalid_argument("link_pool: is not pinned for the device");
  }
  if (chunk_bytes < 1) throw std::invalid_argument("chunk_bytes: must be at least 1");
  if (!(seconds > 0 && seconds <= 60)) {
    throw std::invalid_argument("seconds: must be above 0 and at most 60");
  }
  if (link_rate && !(*link_rate > 0 && std::isfinite(*link_rate))) {
    throw std::invalid_argument("link_rate: must be above 0 and finite");
  }
  const Kernel& kernel = ReadIsa(isa);
  const nb::gil_scoped_release release;
  const Rates rates = MeasureStreams(read_pool.get(), kernel, link_pool.get(), device, chunk_bytes,
                                     static_cast<int64_t>(seconds * 1e9), link_rate);
  return {rates.read, rates.link};
}

nb::list PyIsas() {
  nb::list names;
  for (const Kernel* kernel : AvailableKernels()) names.append(kernel->name);
  return names;
}

nb::dict Registrations(const std::string& platform) {
  nb::dict targets;
  if (platform != "cpu" && platform != "CUDA") return targets;
  for (const Target* target = platform == "cpu" ? CpuTargets() : CudaTargets(); target->name;
       ++target) {
    targets[target->name] = nb::capsule(target->handler);
  }
  return targets;
}

// For the end of the interpreter: nothing of ours runs afterwards.
void Shutdown() {
  const nb::gil_scoped_release release;
  const int64_t deadline = NowNs() + kCloseNs;
  for (const auto& [id, queue] : StepQueues().Snapshot()) queue->Close(deadline);
  Workers::Get().Stop();
}

void BindPool(nb::module_& m) {
  nb::class_<PoolHandle>(m, "Pool")
      .def(nb::init<int, int, int64_t, std::optional<int>>(), nb::arg("num_layers"),
           nb::arg("max_slots"), nb::arg("block_bytes"), nb::arg("device") = nb::none())
      .def_prop_ro("id", &PoolHandle::id)
      .def_prop_ro("committed", [](const PoolHandle& h) { return h.pool()->committed(); })
      .def_prop_ro("num_layers", [](const PoolHandle& h) { return h.pool()->num_layers(); })
      .def_prop_ro("max_slots", [](const PoolHandle& h) { return h.pool()->max_slots(); })
      .def_prop_ro("block_bytes", [](const PoolHandle& h) { return h.pool()->block_bytes(); })
      .def_prop_ro("device", &PoolHandle::device)
      .def("commit", &PoolHandle::Commit, nb::arg("num_slots"))
      .def("view", &PoolHandle::View, nb::arg("layer"), nb::arg("slot"))
      .def(
          "mapped",
          [](const PoolHandle& h, int layer, int num_heads, const std::string& storage) {
            return h.Mapped(layer, num_heads, ReadStorage(storage));
          },
          nb::arg("layer"), nb::arg("num_heads"), nb::arg("storage"))
      .def("close", &PoolHandle::Close);
}

void BindStepQueue(nb::module_& m) {
  nb::class_<QueueHandle>(m, "StepQueue")
      .def(nb::init<>())
      .def_prop_ro("id", &QueueHandle::id)
      .def("push", &QueueHandle::Push, nb::arg("jobs"), nb::arg("host_pool"), nb::arg("table_ptr"),
           nb::arg("table"), nb::arg("load_pool"), nb::arg("loads"), nb::arg("stores"),
           nb::arg("moves"))
      .def("take_back", [](QueueHandle& h) { return h.queue()->TakeBack(); })
      .def_prop_ro("idle", [](const QueueHandle& h) { return h.queue()->Idle(); })
      .def_prop_ro("handshake", [](const QueueHandle& h) { return h.queue()->HandshakeName(); })
      .def_prop_ro("poison", [](const QueueHandle& h) { return h.queue()->Poison(); })
      .def_prop_ro("completed", [](const QueueHandle& h) { return h.queue()->mover().completed(); })
      .def_prop_ro("staged_layers",
                   [](const QueueHandle& h) { return h.queue()->mover().staged_layers(); })
      .def_prop_ro("staged_high_water",
                   [](const QueueHandle& h) { return h.queue()->mover().staged_high_water(); })
      .def_prop_ro("staged_bytes",
                   [](const QueueHandle& h) { return h.queue()->mover().staged_bytes(); })
      .def("wait_completed", &QueueHandle::WaitCompleted, nb::arg("ticket"), nb::arg("timeout_s"))
      .def("drain_timings", &QueueHandle::DrainTimings)
      .def(
          "set_fault",
          [](QueueHandle& h, int store_delay_ms, int job_delay_ms) {
            h.queue()->SetFault(store_delay_ms, job_delay_ms);
          },
          nb::arg("store_delay_ms") = 0, nb::arg("job_delay_ms") = 0)
      .def("close", &QueueHandle::Close, nb::arg("over") = true);
}

}  // namespace

NB_MODULE(_ffi, m) {
  nb::set_leak_warnings(false);  // Engines that live until the interpreter ends are no leak.
  BindPool(m);
  BindStepQueue(m);
  m.def("registrations", &Registrations, nb::arg("platform"));
  m.def("cuda_refusal", [] { return cuda::WhyNoDriver(); });
  m.def(
      "start_workers",
      [](int n) {
        const nb::gil_scoped_release release;
        Workers::Get().Start(n);
      },
      nb::arg("n"));
  m.def("num_workers", [] { return Workers::Get().num_workers(); });
  m.def("time_attention", &PyTimeAttention, nb::arg("num_q_heads"), nb::arg("num_kv_heads"),
        nb::arg("key_dim"), nb::arg("value_dim"), nb::arg("value_in_key"), nb::arg("block"),
        nb::arg("storage"), nb::arg("num_blocks"));
  m.def("isas", &PyIsas);
  m.def("force_isa", &ForceIsa, nb::arg("name"));
  m.def("amx_refusal", &AmxRefusal);
  m.def("isa_of", &PyIsaOf, nb::arg("num_q_heads"), nb::arg("num_kv_heads"), nb::arg("key_dim"),
        nb::arg("value_dim"), nb::arg("value_in_key"), nb::arg("block"), nb::arg("storage"));
  m.def("measure_attention", &PyMeasureAttention, nb::arg("pool"), nb::arg("layer"),
        nb::arg("table"), nb::arg("num_q_heads"), nb::arg("num_kv_heads"), nb::arg("key_dim"),
        nb::arg("value_dim"), nb::arg("value_in_key"), nb::arg("block"), nb::arg("storage"),
        nb::arg("isa"), nb::arg("prefetch_bytes") = kOwnPrefetch);
  m.def("measure_rows", &PyMeasureRows, nb::arg("pool"), nb::arg("layer"), nb::arg("num_slots"),
        nb::arg("num_q_heads"), nb::arg("num_kv_heads"), nb::arg("key_dim"), nb::arg("value_dim"),
        nb::arg("value_in_key"), nb::arg("block"), nb::arg("storage"), nb::arg("isa"));
  m.def("measure_read", &PyMeasureRead, nb::arg("pool"), nb::arg("layer"), nb::arg("num_slots"),
        nb::arg("isa"), nb::arg("prefetch_bytes") = kOwnPrefetch);
  m.def("measure_streams", &PyMeasureStreams, nb::arg("read_pool").none(),
        nb::arg("link_pool").none(), nb::arg("chunk_bytes"), nb::arg("seconds"), nb::arg("isa"),
        nb::arg("device") = nb::none(), nb::arg("link_rate") = nb::none());
  m.def(
      "time_copy",
      [](int64_t num_bytes) {
        const nb::gil_scoped_release release;
        return static_cast<double>(TimeCopy(num_bytes));
      },
      nb::arg("num_bytes"));
  m.def(
      "time_load",
      [](int device, int64_t num_bytes) {
        const nb::gil_scoped_release release;
        return static_cast<double>(cuda::TimeLoad(device, num_bytes));
      },
      nb::arg("device"), nb::arg("num_bytes"));
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(&Shutdown));
}

}  // namespace wscope
