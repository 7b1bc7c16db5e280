// From XLA's buffers to the step queue: checks every shape, dtype and attribute, moves nothing.
#include "handlers.h"

#include <algorithm>
#include <cstdint>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "array_handler.h"
#include "carrier.h"
#include "cuda_lane.h"
#include "layer_attributes.h"
#include "on_stream.h"
#include "operands.h"
#include "pack_handler.h"
#include "place.h"
#include "step_queue.h"
#include "xla/ffi/api/ffi.h"

namespace wscope {
namespace {

// Runs `call(queue, carrier)` for the engine; a failure of any kind poisons the queue.
template <typename Call>
ffi::Error WithQueue(const Place& place, int32_t engine, const Call& call) {
  const std::shared_ptr<StepQueue> queue = StepQueues().Find(engine);
  if (!queue) {
    return ToError(Status::FailedPrecondition("engine: no open step queue has the number " +
                                              std::to_string(engine)));
  }
  if (!queue->OwnedByThisProcess()) {
    return ToError(Status::FailedPrecondition(Creator::ForkText("engine")));
  }
  Status status;
  try {
    if (place.is_host) {
      status = call(*queue, HostCarrier());
    } else {
      std::shared_ptr<CudaLane> lane;
      status = queue->Cuda(&lane);
      if (status.ok()) {
        OnStream carrier(std::move(lane), place.stream);
        status = call(*queue, carrier);
      }
    }
  } catch (const std::bad_alloc& error) {
    status = Status::ResourceExhausted(std::string("out of host memory: ") + error.what());
  } catch (const std::exception& error) {
    status = Status::Internal(error.what());
  }
  if (status.ok()) return ffi::Error::Success();
  return ToError(queue->Fail(std::move(status)));
}

ffi::Error StepBegin(Place place, AnyBuffer order, Out order_out, int32_t engine) {
  return WithQueue(place, engine, [&](StepQueue& queue, Carrier&) {
    if (Status status = CheckOrder(order, order_out); !status.ok()) return status;
    return queue.Begin();
  });
}

ffi::Error HostStart(Place place, AnyBuffer q, AnyBuffer order, Out q_out, Out order_out,
                     int32_t engine, int32_t num_kv_heads, int32_t key_dim, int32_t value_dim,
                     int32_t value_in_key, int32_t block, float scale, std::string_view storage) {
  return WithQueue(place, engine, [&](StepQueue& queue, Carrier& carrier) {
    Status status = First({CheckRank("q", q, 3), CheckStored("q", q), CheckAliased("q", q, *q_out),
                           CheckOrder(order, order_out)});
    if (!status.ok()) return status;
    AttentionShape shape;
    status = ReadShape({num_kv_heads, key_dim, value_dim, value_in_key, block, scale, storage}, q,
                       &shape);
    if (!status.ok()) return status;
    return queue.StartJob(shape, q.dimensions()[0], q.untyped_data(), *StorageOf(q), carrier);
  });
}

ffi::Error HostFinish(Place place, AnyBuffer w_o, AnyBuffer w_lse, AnyBuffer s_o, AnyBuffer s_lse,
                      AnyBuffer order, Out w_o_out, Out w_lse_out, Out s_o_out, Out s_lse_out,
                      Out order_out, Out o, Out lse, int32_t engine) {
  return WithQueue(place, engine, [&](StepQueue& queue, Carrier& carrier) {
    const Status status =
        First({CheckPartial("w_o", w_o, "w_lse", w_lse), CheckPartial("s_o", s_o, "s_lse", s_lse),
               CheckPartial("o", *o, "lse", *lse), CheckSameShape("w_o", w_o, *o),
               CheckSameShape("s_o", s_o, *o), CheckAliased("w_o", w_o, *w_o_out),
               CheckAliased("w_lse", w_lse, *w_lse_out), CheckAliased("s_o", s_o, *s_o_out),
               CheckAliased("s_lse", s_lse, *s_lse_out), CheckOrder(order, order_out)});
    if (!status.ok()) return status;
    const auto dims = o->dimensions();
    return queue.FinishJob(dims[0], dims[1], dims[2], static_cast<float*>(o->untyped_data()),
                           static_cast<float*>(lse->untyped_data()), carrier);
  });
}

ffi::Error Load(Place place, AnyBuffer slots, AnyBuffer after, AnyBuffer order, Out slots_out,
                Out after_out, Out order_out, int32_t engine) {
  return WithQueue(place, engine, [&](StepQueue& queue, Carrier& carrier) {
    const Status status =
        First({CheckRank("slots", slots, 4), CheckStored("slots", slots),
               CheckType("after", after, ffi::DataType::F32, "float32"),
               CheckAliased("slots", slots, *slots_out), CheckAliased("after", after, *after_out),
               CheckOrder(order, order_out)});
    if (!status.ok()) return status;
    const int64_t count = slots.dimensions()[0];
    if (count < 2) {
      return Status::InvalidArgument("slots: is " + ShapeText(slots) +
                                     ", the first dimension must be at least 2");
    }
    return queue.Load({static_cast<uint8_t*>(slots.untyped_data()), count, slots.dimensions()[1],
                       BlockBytes(slots)},
                      carrier);
  });
}

ffi::Error Store(Place place, AnyBuffer blocks, AnyBuffer order, Out order_out, int32_t engine) {
  return WithQueue(place, engine, [&](StepQueue& queue, Carrier& carrier) {
    const Status status = First({CheckRank("blocks", blocks, 3), CheckStored("blocks", blocks),
                                 CheckOrder(order, order_out)});
    if (!status.ok()) return status;
    return queue.Store(static_cast<const uint8_t*>(blocks.untyped_data()), blocks.dimensions()[0],
                       BlockBytes(blocks), carrier);
  });
}

// The signature of each target; where it runs is told by `Where`.
template <typename Where>
auto BindStepBegin() {
  return ffi::Ffi::Bind()
      .Ctx<Where>()
      .template Arg<AnyBuffer>()  // order
      .template Ret<AnyBuffer>()  // order
      .template Attr<int32_t>("engine");
}

template <typename Where>
auto BindHostStart() {
  return ffi::Ffi::Bind()
      .Ctx<Where>()
      .template Arg<AnyBuffer>()  // q
      .template Arg<AnyBuffer>()  // order
      .template Ret<AnyBuffer>()  // q
      .template Ret<AnyBuffer>()  // order
      .template Attr<int32_t>("engine")
      .template Attr<int32_t>("num_kv_heads")
      .template Attr<int32_t>("key_dim")
      .template Attr<int32_t>("value_dim")
      .template Attr<int32_t>("value_in_key")
      .template Attr<int32_t>("block")
      .template Attr<float>("scale")
      .template Attr<std::string_view>("storage");
}

template <typename Where>
auto BindHostFinish() {
  return ffi::Ffi::Bind()
      .Ctx<Where>()
      .template Arg<AnyBuffer>()  // w_o
      .template Arg<AnyBuffer>()  // w_lse
      .template Arg<AnyBuffer>()  // s_o
      .template Arg<AnyBuffer>()  // s_lse
      .template Arg<AnyBuffer>()  // order
      .template Ret<AnyBuffer>()  // w_o
      .template Ret<AnyBuffer>()  // w_lse
      .template Ret<AnyBuffer>()  // s_o
      .template Ret<AnyBuffer>()  // s_lse
      .template Ret<AnyBuffer>()  // order
      .template Ret<AnyBuffer>()  // o
      .template Ret<AnyBuffer>()  // lse
      .template Attr<int32_t>("engine");
}

template <typename Where>
auto BindLoad() {
  return ffi::Ffi::Bind()
      .Ctx<Where>()
      .template Arg<AnyBuffer>()  // slots
      .template Arg<AnyBuffer>()  // after
      .template Arg<AnyBuffer>()  // order
      .template Ret<AnyBuffer>()  // slots
      .template Ret<AnyBuffer>()  // after
      .template Ret<AnyBuffer>()  // order
      .template Attr<int32_t>("engine");
}

template <typename Where>
auto BindStore() {
  return ffi::Ffi::Bind()
      .Ctx<Where>()
      .template Arg<AnyBuffer>()  // blocks
      .template Arg<AnyBuffer>()  // order
      .template Ret<AnyBuffer>()  // order
      .template Attr<int32_t>("engine");
}

XLA_FFI_DEFINE_HANDLER(kStepBegin, StepBegin, BindStepBegin<OnHost>());
XLA_FFI_DEFINE_HANDLER(kHostStart, HostStart, BindHostStart<OnHost>());
XLA_FFI_DEFINE_HANDLER(kHostFinish, HostFinish, BindHostFinish<OnHost>());
XLA_FFI_DEFINE_HANDLER(kLoad, Load, BindLoad<OnHost>());
XLA_FFI_DEFINE_HANDLER(kStore, Store, BindStore<OnHost>());

// Not marked as fit for command buffers: a captured call would not be made again in each step.
XLA_FFI_DEFINE_HANDLER(kCudaStepBegin, StepBegin, BindStepBegin<OnCuda>());
XLA_FFI_DEFINE_HANDLER(kCudaHostStart, HostStart, BindHostStart<OnCuda>());
XLA_FFI_DEFINE_HANDLER(kCudaHostFinish, HostFinish, BindHostFinish<OnCuda>());
XLA_FFI_DEFINE_HANDLER(kCudaLoad, Load, BindLoad<OnCuda>());
XLA_FFI_DEFINE_HANDLER(kCudaStore, Store, BindStore<OnCuda>());

}  // namespace

const Target* CpuTargets() {
  static const Target targets[] = {
      {"wscope_step_begin", reinterpret_cast<void*>(kStepBegin)},
      {"wscope_host_start", reinterpret_cast<void*>(kHostStart)},
      {"wscope_host_finish", reinterpret_cast<void*>(kHostFinish)},
      {"wscope_load", reinterpret_cast<void*>(kLoad)},
      {"wscope_store", reinterpret_cast<void*>(kStore)},
      {"wscope_host_attention", HostAttentionHandler()},
      {"wscope_pack", PackHandler()},
      {nullptr, nullptr},
  };
  return targets;
}

const Target* CudaTargets() {
  static const Target targets[] = {
      {"wscope_step_begin", reinterpret_cast<void*>(kCudaStepBegin)},
      {"wscope_host_start", reinterpret_cast<void*>(kCudaHostStart)},
      {"wscope_host_finish", reinterpret_cast<void*>(kCudaHostFinish)},
      {"wscope_load", reinterpret_cast<void*>(kCudaLoad)},
      {"wscope_store", reinterpret_cast<void*>(kCudaStore)},
      {nullptr, nullptr},
  };
  return targets;
}

}  // namespace wscope
