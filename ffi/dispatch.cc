#include "dispatch.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>

#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "attention.h"
#include "clock.h"
#include "pool.h"

namespace wscope {
namespace {

// Blocks that a timing runs over: more than the caches of most cores, few milliseconds.
constexpr int64_t kTimingBytes = int64_t{32} << 20;
constexpr int kTimingRuns = 5;

struct Path {
  const Kernel* kernel;
  bool available;
};

#if defined(__x86_64__)

// Whether the system grants this process the use of tiles.
bool AskForAmx() {
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool HasAmx() {
  return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
         __builtin_cpu_supports("avx512bf16");
}

bool HasAvx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

// In the order of preference where nothing was timed, simplest first.
std::vector<Path> AllPaths() {
  __builtin_cpu_init();
  const bool avx512 = HasAvx512();
  return {{&kPortableKernel, true},
          {&kAvx2Kernel, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")},
          {&kAvx512Kernel, avx512},
          {&kAvx512Bf16Kernel, avx512 && __builtin_cpu_supports("avx512bf16")},
          {&kAmxKernel, avx512 && HasAmx() && AskForAmx()}};
}

#else

std::vector<Path> AllPaths() { return {{&kPortableKernel, true}}; }

#endif

const std::vector<Path>& Paths() {
  static const auto* const paths = new std::vector<Path>(AllPaths());
  return *paths;
}

using ShapeKey = std::array<int, 6>;

// The choices made so far.
struct Choices {
  std::mutex mutex;
  const Kernel* forced = nullptr;
  std::map<ShapeKey, const Kernel*> by_shape;
};

Choices& TheChoices() {
  static auto* const choices = new Choices;  // Never destroyed: jobs may run until exit.
  return *choices;
}

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<void, Free>;

Memory Aligned(int64_t bytes) {
  Memory memory(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
  if (!memory) throw std::bad_alloc();
  return memory;
}

// The shortest of some runs of a kernel over the same blocks. CPU time, not the wall clock: other
// work on the machine must not change the choice.
int64_t TimeKernel(const Kernel& kernel, const HeadShape& shape, const HeadBlocks& blocks,
                   const float* q, const SoftmaxState& state) {
  const Memory scratch = Aligned(kernel.scratch_bytes(shape));
  int64_t best = INT64_MAX;
  for (int run = 0; run < kTimingRuns; ++run) {
    ClearState(shape, state);
    const int64_t start = ThreadCpuNs();
    kernel.attend(shape, q, blocks, scratch.get(), state);
    best = std::min(best, ThreadCpuNs() - start);
  }
  return best;
}

const Kernel* ChooseByTiming(const HeadShape& shape) {
  // Of those in float32 the widest vectors win everywhere; what rounds may or may not pay.
  std::vector<const Kernel*> candidates;
  for (const Kernel* kernel : AvailableKernels()) {
    if (!kernel->supports(shape) || shape.group < kernel->least_group) continue;
    if (kernel->exact) candidates.clear();
    candidates.push_back(kernel);
  }
  if (candidates.size() == 1) return candidates[0];
  const int64_t dims = shape.key_dim + (shape.value_in_key ? 0 : shape.value_dim);
  const int64_t head_bytes = shape.block * dims * (shape.bfloat16 ? 2 : 4);
  const int64_t num_blocks = std::max<int64_t>(1, kTimingBytes / head_bytes);
  Pool pool(1, static_cast<int>(num_blocks), head_bytes);
  pool.Commit(pool.max_slots());
  std::memset(pool.Block(0, 0), 0x3c, num_blocks * head_bytes);  // Small normal numbers.
  std::vector<const uint8_t*> blocks;
  for (int i = 0; i < pool.max_slots(); ++i) blocks.push_back(pool.Block(0, i));
  const std::vector<float> q(int64_t{shape.group} * shape.key_dim, 0.01f);
  std::vector<float> o(int64_t{shape.group} * shape.value_dim), max(shape.group), sum(shape.group);
  const HeadBlocks run{blocks.data(), static_cast<int>(num_blocks), 0, nullptr, kOwnPrefetch};
  const Kernel* best = nullptr;
  double best_ns = 0.0;
  for (const Kernel* kernel : candidates) {
    const auto ns = static_cast<double>(
        TimeKernel(*kernel, shape, run, q.data(), {o.data(), max.data(), sum.data()}));
    if (!best || ns < kernel->worth * best_ns) {
      best = kernel;
      best_ns = ns;
    }
  }
  return best;
}

}  // namespace

const std::vector<const Kernel*>& AvailableKernels() {
  static const auto* const kernels = [] {
    auto* const list = new std::vector<const Kernel*>;
    for (const Path& path : Paths()) {
      if (path.available) list->push_back(path.kernel);
    }
    return list;
  }();
  return *kernels;
}

std::string AmxRefusal() {
#if defined(__x86_64__)
  for (const Path& path : Paths()) {
    if (std::string(path.kernel->name) == "amx" && !path.available && HasAmx()) {
      return "the system does not grant the use of AMX tiles (arch_prctl; a kernel before 5.16, or "
             "a small alternate signal stack such as faulthandler's)";
    }
  }
#endif
  return {};
}

void ForceIsa(const std::string& name) {
  Choices& choices = TheChoices();
  const Kernel* forced = nullptr;
  if (!name.empty()) {
    std::string known;
    bool is_known = false;
    for (const Path& path : Paths()) {
      known += (known.empty() ? "" : ", ") + std::string(path.kernel->name);
      if (name != path.kernel->name) continue;
      is_known = true;
      if (path.available) forced = path.kernel;
    }
    if (!is_known) {
      throw std::invalid_argument("\"" + name + "\" is no instruction set of this build (" + known +
                                  ")");
    }
    if (!forced) {
      const std::string why = name == "amx" ? AmxRefusal() : "";
      throw std::runtime_error(
          "\"" + name + "\" cannot run here: " + (why.empty() ? "the processor lacks it" : why));
    }
  }
  const std::lock_guard<std::mutex> lock(choices.mutex);
  choices.forced = forced;
  choices.by_shape.clear();
}

const Kernel* FindKernel(const std::string& name) {
  for (const Kernel* kernel : AvailableKernels()) {
    if (name == kernel->name) return kernel;
  }
  return nullptr;
}

const Kernel& Resolve(const Kernel& isa, const HeadShape& shape) {
  const Kernel* kernel = &isa;
  while (!kernel->supports(shape)) kernel = kernel->general;
  return *kernel;
}

const Kernel& KernelFor(const HeadShape& shape) {
  Choices& choices = TheChoices();
  const std::lock_guard<std::mutex> lock(choices.mutex);
  const ShapeKey key{shape.group, shape.key_dim,      shape.value_dim,
                     shape.block, shape.value_in_key, shape.bfloat16};
  const Kernel*& kernel = choices.by_shape[key];
  if (!kernel) {
    kernel = choices.forced ? &Resolve(*choices.forced, shape) : ChooseByTiming(shape);
  }
  return *kernel;
}

}  // namespace wscope
