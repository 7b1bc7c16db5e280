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

#include "attention.h"
#include "host_job.h"
#include "operands.h"
#include "pack_handler.h"
#include "step_queue.h"
#include "workers.h"
#include "xla/ffi/api/ffi.h"

namespace wscope {
namespace {

ffi::Error ToError(const Status& status) {
  switch (status.kind) {
    case Status::Kind::kOk:
      return ffi::Error::Success();
    case Status::Kind::kInvalidArgument:
      return ffi::Error(ffi::ErrorCode::kInvalidArgument, status.text);
    case Status::Kind::kFailedPrecondition:
      return ffi::Error(ffi::ErrorCode::kFailedPrecondition, status.text);
    case Status::Kind::kResourceExhausted:
      return ffi::Error(ffi::ErrorCode::kResourceExhausted, status.text);
    case Status::Kind::kInternal:
      break;
  }
  return ffi::Error(ffi::ErrorCode::kInternal, status.text);
}

// Runs `call(queue)` for the engine; a failure of any kind poisons the queue.
template <typename Call>
ffi::Error WithQueue(int32_t engine, const Call& call) {
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
    status = call(*queue);
  } catch (const std::bad_alloc& error) {
    status = Status::ResourceExhausted(std::string("out of host memory: ") + error.what());
  } catch (const std::exception& error) {
    status = Status::Internal(error.what());
  }
  if (status.ok()) return ffi::Error::Success();
  return ToError(queue->Fail(std::move(status)));
}

ffi::Error StepBegin(AnyBuffer order, Out order_out, int32_t engine) {
  return WithQueue(engine, [&](StepQueue& queue) {
    if (Status status = CheckOrder(order, order_out); !status.ok()) return status;
    return queue.Begin();
  });
}

// The attributes of host_start that describe a layer.
struct LayerAttributes {
  int32_t num_kv_heads, key_dim, value_dim, value_in_key, block;
  float scale;
  std::string_view storage;
};

Status ReadShape(const LayerAttributes& layer, const AnyBuffer& q, AttentionShape* shape) {
  if (layer.storage != "float32" && layer.storage != "bfloat16") {
    return Status::InvalidArgument("storage: is \"" + std::string(layer.storage) +
                                   "\", must be \"float32\" or \"bfloat16\"");
  }
  if (layer.value_in_key != 0 && layer.value_in_key != 1) {
    return Status::InvalidArgument("value_in_key: must be 0 or 1");
  }
  const int64_t num_q_heads = q.dimensions()[1];
  if (num_q_heads > INT32_MAX || q.dimensions()[2] != layer.key_dim) {
    return Status::InvalidArgument("q: is " + ShapeText(q) + ", the key_dim is " +
                                   std::to_string(layer.key_dim));
  }
  shape->num_q_heads = static_cast<int>(num_q_heads);
  shape->num_kv_heads = layer.num_kv_heads;
  shape->key_dim = layer.key_dim;
  shape->value_dim = layer.value_dim;
  shape->value_in_key = layer.value_in_key == 1;
  shape->block = layer.block;
  shape->storage = layer.storage == "float32" ? Storage::kFloat32 : Storage::kBfloat16;
  shape->scale = layer.scale;
  std::string wrong = CheckShape(*shape);
  return wrong.empty() ? Status::Ok() : Status::InvalidArgument(std::move(wrong));
}

ffi::Error HostStart(AnyBuffer q, AnyBuffer order, Out q_out, Out order_out, int32_t engine,
                     int32_t num_kv_heads, int32_t key_dim, int32_t value_dim, int32_t value_in_key,
                     int32_t block, float scale, std::string_view storage) {
  return WithQueue(engine, [&](StepQueue& queue) {
    Status status = First({CheckRank("q", q, 3), CheckStored("q", q), CheckAliased("q", q, *q_out),
                           CheckOrder(order, order_out)});
    if (!status.ok()) return status;
    AttentionShape shape;
    status = ReadShape({num_kv_heads, key_dim, value_dim, value_in_key, block, scale, storage}, q,
                       &shape);
    if (!status.ok()) return status;
    return queue.StartJob(shape, q.dimensions()[0], q.untyped_data(), *StorageOf(q));
  });
}

ffi::Error HostFinish(AnyBuffer w_o, AnyBuffer w_lse, AnyBuffer s_o, AnyBuffer s_lse,
                      AnyBuffer order, Out w_o_out, Out w_lse_out, Out s_o_out, Out s_lse_out,
                      Out order_out, Out o, Out lse, int32_t engine) {
  return WithQueue(engine, [&](StepQueue& queue) {
    const Status status =
        First({CheckPartial("w_o", w_o, "w_lse", w_lse), CheckPartial("s_o", s_o, "s_lse", s_lse),
               CheckPartial("o", *o, "lse", *lse), CheckSameShape("w_o", w_o, *o),
               CheckSameShape("s_o", s_o, *o), CheckAliased("w_o", w_o, *w_o_out),
               CheckAliased("w_lse", w_lse, *w_lse_out), CheckAliased("s_o", s_o, *s_o_out),
               CheckAliased("s_lse", s_lse, *s_lse_out), CheckOrder(order, order_out)});
    if (!status.ok()) return status;
    const auto dims = o->dimensions();
    return queue.FinishJob(dims[0], dims[1], dims[2], static_cast<float*>(o->untyped_data()),
                           static_cast<float*>(lse->untyped_data()));
  });
}

ffi::Error Load(AnyBuffer slots, AnyBuffer after, AnyBuffer order, Out slots_out, Out after_out,
                Out order_out, int32_t engine) {
  return WithQueue(engine, [&](StepQueue& queue) {
    const Status status =
        First({CheckRank("slots", slots, 4), CheckStored("slots", slots),
               CheckType("after", after, ffi::DataType::F32, "float32"),
               CheckAliased("slots", slots, *slots_out), CheckAliased("after", after, *after_out),
               CheckOrder(order, order_out)});
    if (!status.ok()) return status;
    if (slots.dimensions()[0] != 2) {
      return Status::InvalidArgument("slots: is " + ShapeText(slots) +
                                     ", the first dimension must be 2");
    }
    return queue.Load(static_cast<uint8_t*>(slots.untyped_data()), slots.dimensions()[1],
                      BlockBytes(slots));
  });
}

ffi::Error Store(AnyBuffer blocks, AnyBuffer order, Out order_out, int32_t engine) {
  return WithQueue(engine, [&](StepQueue& queue) {
    const Status status = First({CheckRank("blocks", blocks, 3), CheckStored("blocks", blocks),
                                 CheckOrder(order, order_out)});
    if (!status.ok()) return status;
    return queue.Store(static_cast<const uint8_t*>(blocks.untyped_data()), blocks.dimensions()[0],
                       BlockBytes(blocks));
  });
}

// Attention over arrays: q [b, H, K], blocks [b, n, G, E] in tile order, selected uint32 [b, n D /
// 32].
Status AttendArrays(const AttentionShape& shape, const AnyBuffer& q, const AnyBuffer& blocks,
                    const AnyBuffer& selected, float* o, float* lse) {
  const int64_t num_rows = q.dimensions()[0];
  const int64_t row_blocks = blocks.dimensions()[1];
  const auto words = selected.dimensions();
  if (blocks.dimensions()[0] != num_rows || words[0] != num_rows ||
      BlockBytes(blocks) != shape.block_bytes() || words[1] != row_blocks * shape.block / 32) {
    return Status::InvalidArgument("blocks: is " + ShapeText(blocks) + " and selected " +
                                   ShapeText(selected) + ", which do not fit q of " + ShapeText(q));
  }
  std::vector<int64_t> row_ptr;
  for (int64_t row = 0; row <= num_rows; ++row) row_ptr.push_back(row * row_blocks);
  std::vector<const uint8_t*> pointers;
  for (int64_t i = 0; i < num_rows * row_blocks; ++i) {
    pointers.push_back(static_cast<const uint8_t*>(blocks.untyped_data()) +
                       i * shape.block_bytes());
  }
  const auto job = std::make_shared<HostJob>(
      shape, static_cast<int>(num_rows), row_ptr.data(), std::move(pointers),
      static_cast<const uint32_t*>(selected.untyped_data()), Workers::Get().num_workers());
  CopyToFloat(q.untyped_data(), *StorageOf(q), job->q_size(), job->q());
  if (job->num_parts() > 0) {
    const std::shared_ptr<Task> task = MakeTask(job);
    if (!Workers::Get().Submit(task)) {
      return Status::FailedPrecondition("host_attention: there are no workers; call start_workers");
    }
    task->Wait();
  }
  std::copy_n(job->o(), job->o_size(), o);
  std::copy_n(job->lse(), job->lse_size(), lse);
  return Status::Ok();
}

ffi::Error HostAttention(AnyBuffer q, AnyBuffer blocks, AnyBuffer selected, Out o, Out lse,
                         int32_t num_kv_heads, int32_t key_dim, int32_t value_dim,
                         int32_t value_in_key, int32_t block, float scale) {
  try {
    Status status =
        First({CheckRank("q", q, 3), CheckStored("q", q), CheckRank("blocks", blocks, 4),
               CheckStored("blocks", blocks), CheckRank("selected", selected, 2),
               CheckType("selected", selected, ffi::DataType::U32, "uint32"),
               CheckPartial("o", *o, "lse", *lse)});
    if (!status.ok()) return ToError(status);
    const char* const storage = StorageOf(blocks) == Storage::kFloat32 ? "float32" : "bfloat16";
    AttentionShape shape;
    status = ReadShape({num_kv_heads, key_dim, value_dim, value_in_key, block, scale, storage}, q,
                       &shape);
    if (!status.ok()) return ToError(status);
    return ToError(AttendArrays(shape, q, blocks, selected, static_cast<float*>(o->untyped_data()),
                                static_cast<float*>(lse->untyped_data())));
  } catch (const std::exception& error) {
    return ToError(Status::Internal(error.what()));
  }
}

XLA_FFI_DEFINE_HANDLER(kHostAttention, HostAttention,
                       ffi::Ffi::Bind()
                           .Arg<AnyBuffer>()  // q
                           .Arg<AnyBuffer>()  // blocks
                           .Arg<AnyBuffer>()  // selected
                           .Ret<AnyBuffer>()  // o
                           .Ret<AnyBuffer>()  // lse
                           .Attr<int32_t>("num_kv_heads")
                           .Attr<int32_t>("key_dim")
                           .Attr<int32_t>("value_dim")
                           .Attr<int32_t>("value_in_key")
                           .Attr<int32_t>("block")
                           .Attr<float>("scale"));

XLA_FFI_DEFINE_HANDLER(kStepBegin, StepBegin,
                       ffi::Ffi::Bind()
                           .Arg<AnyBuffer>()  // order
                           .Ret<AnyBuffer>()  // order
                           .Attr<int32_t>("engine"));

XLA_FFI_DEFINE_HANDLER(kHostStart, HostStart,
                       ffi::Ffi::Bind()
                           .Arg<AnyBuffer>()  // q
                           .Arg<AnyBuffer>()  // order
                           .Ret<AnyBuffer>()  // q
                           .Ret<AnyBuffer>()  // order
                           .Attr<int32_t>("engine")
                           .Attr<int32_t>("num_kv_heads")
                           .Attr<int32_t>("key_dim")
                           .Attr<int32_t>("value_dim")
                           .Attr<int32_t>("value_in_key")
                           .Attr<int32_t>("block")
                           .Attr<float>("scale")
                           .Attr<std::string_view>("storage"));

XLA_FFI_DEFINE_HANDLER(kHostFinish, HostFinish,
                       ffi::Ffi::Bind()
                           .Arg<AnyBuffer>()  // w_o
                           .Arg<AnyBuffer>()  // w_lse
                           .Arg<AnyBuffer>()  // s_o
                           .Arg<AnyBuffer>()  // s_lse
                           .Arg<AnyBuffer>()  // order
                           .Ret<AnyBuffer>()  // w_o
                           .Ret<AnyBuffer>()  // w_lse
                           .Ret<AnyBuffer>()  // s_o
                           .Ret<AnyBuffer>()  // s_lse
                           .Ret<AnyBuffer>()  // order
                           .Ret<AnyBuffer>()  // o
                           .Ret<AnyBuffer>()  // lse
                           .Attr<int32_t>("engine"));

XLA_FFI_DEFINE_HANDLER(kLoad, Load,
                       ffi::Ffi::Bind()
                           .Arg<AnyBuffer>()  // slots
                           .Arg<AnyBuffer>()  // after
                           .Arg<AnyBuffer>()  // order
                           .Ret<AnyBuffer>()  // slots
                           .Ret<AnyBuffer>()  // after
                           .Ret<AnyBuffer>()  // order
                           .Attr<int32_t>("engine"));

XLA_FFI_DEFINE_HANDLER(kStore, Store,
                       ffi::Ffi::Bind()
                           .Arg<AnyBuffer>()  // blocks
                           .Arg<AnyBuffer>()  // order
                           .Ret<AnyBuffer>()  // order
                           .Attr<int32_t>("engine"));

}  // namespace

const Target* CpuTargets() {
  static const Target targets[] = {
      {"wscope_step_begin", reinterpret_cast<void*>(kStepBegin)},
      {"wscope_host_start", reinterpret_cast<void*>(kHostStart)},
      {"wscope_host_finish", reinterpret_cast<void*>(kHostFinish)},
      {"wscope_load", reinterpret_cast<void*>(kLoad)},
      {"wscope_store", reinterpret_cast<void*>(kStore)},
      {"wscope_host_attention", reinterpret_cast<void*>(kHostAttention)},
      {"wscope_pack", PackHandler()},
      {nullptr, nullptr},
  };
  return targets;
}

}  // namespace wscope
