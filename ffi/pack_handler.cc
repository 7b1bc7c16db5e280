#include "pack_handler.h"

#include <cstdint>
#include <optional>
#include <string>

#include "operands.h"
#include "pack.h"

namespace wscope {
namespace {

Status CheckEntries(const char* name, const AnyBuffer& entries, const AnyBuffer& key) {
  Status status = First({CheckRank(name, entries, 3), CheckStored(name, entries)});
  if (!status.ok()) return status;
  const auto dims = entries.dimensions();
  if (entries.element_type() == key.element_type() && dims[0] == key.dimensions()[0] &&
      dims[1] == key.dimensions()[1] && dims[2] >= 1 && dims[2] <= INT32_MAX) {
    return Status::Ok();
  }
  return Status::InvalidArgument(std::string(name) + ": is " + ShapeText(entries) +
                                 ", does not fit key of " + ShapeText(key));
}

Status CheckPack(const AnyBuffer& key, const std::optional<AnyBuffer>& value,
                 const AnyBuffer& blocks, int32_t block, bool tiles) {
  Status status = CheckEntries("key", key, key);
  if (status.ok() && value) status = CheckEntries("value", *value, key);
  if (!status.ok()) return status;
  const auto dims = key.dimensions();
  if (block < 1 || dims[0] % block != 0 || (tiles && block % 32 != 0)) {
    return Status::InvalidArgument("block: is " + std::to_string(block) +
                                   ", must divide the number of entries " +
                                   std::to_string(dims[0]) + " and be a multiple of 32 for tiles");
  }
  status = First({CheckRank("blocks", blocks, 3), CheckStored("blocks", blocks)});
  if (!status.ok()) return status;
  const auto out = blocks.dimensions();
  const int64_t stored = dims[2] + (value ? value->dimensions()[2] : 0);
  if (blocks.element_type() == key.element_type() && out[0] == dims[0] / block &&
      out[1] == dims[1] && out[2] == block * stored) {
    return Status::Ok();
  }
  return Status::InvalidArgument("blocks: is " + ShapeText(blocks) + ", does not fit key of " +
                                 ShapeText(key));
}

ffi::Error Pack(AnyBuffer key, std::optional<AnyBuffer> value, Out blocks, int32_t block,
                int32_t tiles) {
  const Status status = CheckPack(key, value, *blocks, block, tiles != 0);
  if (!status.ok()) return ffi::Error(ffi::ErrorCode::kInvalidArgument, status.text);
  PackShape shape;
  shape.num_kv_heads = static_cast<int>(key.dimensions()[1]);
  shape.key_dim = static_cast<int>(key.dimensions()[2]);
  shape.value_dim = value ? static_cast<int>(value->dimensions()[2]) : 0;
  shape.block = block;
  shape.item_bytes = static_cast<int>(ItemBytes(*StorageOf(key)));
  shape.tiles = tiles != 0;
  PackBlocks(shape, key.dimensions()[0] / block, static_cast<const uint8_t*>(key.untyped_data()),
             value ? static_cast<const uint8_t*>(value->untyped_data()) : nullptr,
             static_cast<uint8_t*>(blocks->untyped_data()));
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kPack, Pack,
                       ffi::Ffi::Bind()
                           .Arg<AnyBuffer>()          // key
                           .OptionalArg<AnyBuffer>()  // value
                           .Ret<AnyBuffer>()          // blocks
                           .Attr<int32_t>("block")
                           .Attr<int32_t>("tiles"));

}  // namespace

void* PackHandler() { return reinterpret_cast<void*>(kPack); }

}  // namespace wscope
