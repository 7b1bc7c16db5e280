// Every kernel alone on the shared cases, and the choice between them.
#include "attention.h"

#include <cstdio>
#include <limits>
#include <stdexcept>
#include <string>

#include "attention_check.h"
#include "cases.h"
#include "check.h"
#include "dispatch.h"

namespace wscope {
namespace {

void TestForce() {
  CHECK(Throws<std::invalid_argument>([] { ForceIsa("sse9"); }, "portable"));
  const HeadShape shape{4, 128, 128, 64, false, true, 1.0f};
  for (const Kernel* isa : AvailableKernels()) {
    ForceIsa(isa->name);
    CHECK(&KernelFor(shape) == isa);
  }
  for (const char* name : {"avx2", "avx512", "avx512_bf16", "amx"}) {
    bool available = false;
    for (const Kernel* isa : AvailableKernels()) available |= std::string(isa->name) == name;
    if (!available) {
      CHECK(Throws<std::exception>([&] { ForceIsa(name); }, name));
    }
  }
  ForceIsa("");
  const Kernel& best = KernelFor(shape);
  CHECK(&best == &KernelFor(shape));
  std::printf("best for gqa4_d128: %s\n", best.name);
}

void TestEmptyMerge() {
  const AttentionShape shape{2, 1, 8, 8, false, 32, Storage::kFloat32, 1.0f};
  OwnState a(shape);
  OwnState b(shape);
  MergeState(shape, a.get(), b.get());
  float o[16];
  float lse[2];
  FinishState(shape, b.get(), o, lse);
  for (const float number : o) CHECK(number == 0.0f);
  for (const float number : lse) CHECK(number == -std::numeric_limits<float>::infinity());
}

void TestCheckShape() {
  const AttentionShape good{4, 2, 8, 8, false, 32, Storage::kFloat32, 1.0f};
  CHECK(CheckShape(good).empty());
  AttentionShape bad = good;
  bad.num_kv_heads = 3;
  CHECK(CheckShape(bad).find("num_q_heads") == 0);
  bad = good;
  bad.block = 0;
  CHECK(CheckShape(bad).find("block") == 0);
  bad.block = 48;
  CHECK(CheckShape(bad).find("block") == 0);
  bad = good;
  bad.value_in_key = true;
  bad.value_dim = 9;
  CHECK(CheckShape(bad).find("value_dim") == 0);
  bad = good;
  bad.num_q_heads = bad.num_kv_heads = bad.key_dim = INT32_MAX;
  bad.block = 1 << 30;
  CHECK(CheckShape(bad).find("overflow") != std::string::npos);
}

}  // namespace
}  // namespace wscope

int main() {
  for (const wscope::Kernel* kernel : wscope::KernelsToTest()) {
    for (const wscope::Case& test : wscope::AllCases()) {
      wscope::TestCase(*kernel, test);
      wscope::TestSelected(*kernel, test);
    }
  }
  wscope::TestForce();
  wscope::TestEmptyMerge();
  wscope::TestCheckShape();
}
