#include "cuda_result.h"

#include <limits>

namespace wscope {
namespace {

using cuda::Address;
using cuda::Check;

constexpr unsigned kThreads = 256;  // Of a block.

// A number each thread: what the memory of the host takes to answer is hidden by many. Volatile:
// the host writes the same place again.
constexpr char kPtx[] = R"(
.version 6.4
.target sm_70
.address_size 64

.visible .entry carry_result(.param .u64 from, .param .u64 o, .param .u64 lse,
                             .param .u32 o_size, .param .u32 size)
{
  .reg .pred %outside, %in_lse;
  .reg .b32 %block, %threads, %thread, %i, %o_size, %size, %number;
  .reg .b64 %from, %to, %offset;

  mov.u32 %block, %ctaid.x;
  mov.u32 %threads, %ntid.x;
  mov.u32 %thread, %tid.x;
  mad.lo.u32 %i, %block, %threads, %thread;
  ld.param.u32 %size, [size];
  setp.ge.u32 %outside, %i, %size;
  @%outside bra END;
  ld.param.u64 %from, [from];
  cvta.to.global.u64 %from, %from;
  mul.wide.u32 %offset, %i, 4;
  add.u64 %from, %from, %offset;
  ld.volatile.global.u32 %number, [%from];
  ld.param.u32 %o_size, [o_size];
  setp.ge.u32 %in_lse, %i, %o_size;
  @%in_lse bra LSE;
  ld.param.u64 %to, [o];
  bra STORE;
LSE:
  ld.param.u64 %to, [lse];
  sub.u32 %i, %i, %o_size;
  mul.wide.u32 %offset, %i, 4;
STORE:
  cvta.to.global.u64 %to, %to;
  add.u64 %to, %to, %offset;
  st.global.u32 [%to], %number;
END:
  ret;
}
)";

const cuda::Driver& Cu() { return *cuda::GetDriver(); }

}  // namespace

ResultCarrier::ResultCarrier() : context_(cuda::Current()) {
  const cuda::Driver& driver = Cu();
  if (!driver.ModuleLoadData || !driver.ModuleGetFunction || !driver.ModuleUnload ||
      !driver.LaunchKernel) {
    name_ = "copies (the NVIDIA driver is too old for kernels of ours)";
    return;
  }
  Status status = Check(driver.ModuleLoadData(&module_, kPtx), "kernel");
  if (!status.ok()) {
    module_ = nullptr;
  } else {
    status = Check(driver.ModuleGetFunction(&kernel_, module_, "carry_result"), "kernel");
    if (!status.ok()) kernel_ = nullptr;
  }
  if (!status.ok()) name_ = "copies (" + status.text + ")";
}

ResultCarrier::~ResultCarrier() {
  if (!module_) return;
  const cuda::Scope scope(context_);
  Cu().ModuleUnload(module_);
}

Status ResultCarrier::Carry(const float* from, int64_t o_size, int64_t lse_size, float* o,
                            float* lse, cuda::Stream stream) const {
  constexpr int64_t kItem = sizeof(float);
  const int64_t size = o_size + lse_size;
  if (!kernel_ || size > std::numeric_limits<int32_t>::max()) {
    return First({Check(Cu().MemcpyHtoDAsync(Address(o), from, o_size * kItem, stream), "o"),
                  Check(Cu().MemcpyHtoDAsync(Address(lse), from + o_size, lse_size * kItem, stream),
                        "lse")});
  }
  cuda::DevicePtr from_address = Address(from), o_address = Address(o), lse_address = Address(lse);
  auto o_count = static_cast<uint32_t>(o_size), count = static_cast<uint32_t>(size);
  void* parameters[] = {&from_address, &o_address, &lse_address, &o_count, &count};
  const unsigned blocks = (count + kThreads - 1) / kThreads;
  return Check(
      Cu().LaunchKernel(kernel_, blocks, 1, 1, kThreads, 1, 1, 0, stream, parameters, nullptr),
      "result");
}

}  // namespace wscope
