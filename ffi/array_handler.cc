#include "array_handler.h"

#include <algorithm>
#include <cstdint>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "host_job.h"
#include "layer_attributes.h"
#include "operands.h"
#include "workers.h"
#include "xla/ffi/api/ffi.h"

namespace wscope {
namespace {

// Attention over arrays: q [b, H, K], blocks [b, n, G, E] in tile order, selected uint32 [b, n D /
// 32].
Status AttendArrays(const AttentionShape& shape, const AnyBuffer& q, const AnyBuffer& blocks,
                    const AnyBuffer& selected, AnyBuffer& o, AnyBuffer& lse) {
  const int64_t num_rows = q.dimensions()[0];
  const int64_t row_blocks = blocks.dimensions()[1];
  const auto words = selected.dimensions();
  if (blocks.dimensions()[0] != num_rows || words[0] != num_rows ||
      BlockBytes(blocks) != shape.block_bytes() || words[1] != row_blocks * shape.block / 32) {
    return Status::InvalidArgument("blocks: is " + ShapeText(blocks) + " and selected " +
                                   ShapeText(selected) + ", which do not fit q of " + ShapeText(q));
  }
  const auto result = o.dimensions();
  if (result[0] != num_rows || result[1] != shape.num_q_heads || result[2] != shape.value_dim) {
    return Status::InvalidArgument("o: is " + ShapeText(o) + ", which does not fit q of " +
                                   ShapeText(q) + " and a value of " +
                                   std::to_string(shape.value_dim));
  }
  std::vector<int64_t> row_ptr;
  for (int64_t row = 0; row <= num_rows; ++row) row_ptr.push_back(row * row_blocks);
  std::vector<const uint8_t*> pointers;
  for (int64_t i = 0; i < num_rows * row_blocks; ++i) {
    pointers.push_back(static_cast<const uint8_t*>(blocks.untyped_data()) +
                       i * shape.block_bytes());
  }
  const auto job = std::make_shared<HostJob>(
      shape,
      std::make_shared<RowBlocks>(static_cast<int>(num_rows), row_ptr.data(), std::move(pointers)),
      static_cast<const uint32_t*>(selected.untyped_data()),
      std::max(1, Workers::Get().num_workers()));
  job->Bind(q.untyped_data(), *StorageOf(q), static_cast<float*>(o.untyped_data()),
            static_cast<float*>(lse.untyped_data()));
  if (job->num_parts() > 0) {
    const std::shared_ptr<Task> task = MakeTask(job);
    if (!Workers::Get().Submit(task)) {
      return Status::FailedPrecondition("host_attention: there are no workers; call start_workers");
    }
    task->Wait();
  }
  if (job->is_void()) return Status::ResourceExhausted("host_attention: out of host memory");
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
    return ToError(AttendArrays(shape, q, blocks, selected, *o, *lse));
  } catch (const std::bad_alloc& error) {
    return ToError(Status::ResourceExhausted(std::string("out of host memory: ") + error.what()));
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

}  // namespace

void* HostAttentionHandler() { return reinterpret_cast<void*>(kHostAttention); }

}  // namespace wscope
