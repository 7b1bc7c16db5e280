// Checks of a custom call's operands. A text begins with the operand's name.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "attention.h"
#include "status.h"
#include "xla/ffi/api/ffi.h"

namespace wscope {

namespace ffi = xla::ffi;
using ffi::AnyBuffer;
using Out = ffi::Result<AnyBuffer>;

inline ffi::Error ToError(const Status& status) {
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

inline std::string ShapeText(const AnyBuffer& buffer) {
  std::string text = "[";
  for (const int64_t dim : buffer.dimensions()) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(dim);
  }
  return text + "]";
}

inline bool SameShape(const AnyBuffer& a, const AnyBuffer& b) {
  const auto x = a.dimensions();
  const auto y = b.dimensions();
  if (x.size() != y.size()) return false;
  for (size_t i = 0; i < x.size(); ++i) {
    if (x[i] != y[i]) return false;
  }
  return true;
}

inline Status CheckRank(const char* name, const AnyBuffer& buffer, size_t rank) {
  if (buffer.dimensions().size() == rank) return Status::Ok();
  return Status::InvalidArgument(std::string(name) + ": is " + ShapeText(buffer) + ", must have " +
                                 std::to_string(rank) + " dimensions");
}

inline Status CheckType(const char* name, const AnyBuffer& buffer, ffi::DataType type,
                        const char* want) {
  if (buffer.element_type() == type) return Status::Ok();
  return Status::InvalidArgument(std::string(name) + ": must be " + want);
}

inline std::optional<Storage> StorageOf(const AnyBuffer& buffer) {
  if (buffer.element_type() == ffi::DataType::F32) return Storage::kFloat32;
  if (buffer.element_type() == ffi::DataType::BF16) return Storage::kBfloat16;
  return std::nullopt;
}

inline Status CheckStored(const char* name, const AnyBuffer& buffer) {
  if (StorageOf(buffer)) return Status::Ok();
  return Status::InvalidArgument(std::string(name) + ": must be float32 or bfloat16");
}

// The result is the operand, in place.
inline Status CheckAliased(const char* name, const AnyBuffer& in, AnyBuffer& out) {
  if (in.element_type() == out.element_type() && SameShape(in, out) &&
      in.untyped_data() == out.untyped_data()) {
    return Status::Ok();
  }
  return Status::InvalidArgument(std::string(name) +
                                 ": the result must alias the operand (input_output_aliases)");
}

inline Status CheckOrder(const AnyBuffer& in, Out& out) {
  if (Status status = CheckType("order", in, ffi::DataType::S32, "int32"); !status.ok()) {
    return status;
  }
  if (Status status = CheckRank("order", in, 0); !status.ok()) return status;
  return CheckAliased("order", in, *out);
}

// Bytes of the last two dimensions. XLA's buffers exist, so their sizes fit.
inline int64_t BlockBytes(const AnyBuffer& buffer) {
  const auto dims = buffer.dimensions();
  return dims[dims.size() - 2] * dims[dims.size() - 1] * ItemBytes(*StorageOf(buffer));
}

// A partial (o, lse), float32; `o` is [b, H, V], `lse` [b, H].
inline Status CheckPartial(const char* o_name, const AnyBuffer& o, const char* lse_name,
                           const AnyBuffer& lse) {
  Status status = First({CheckRank(o_name, o, 3), CheckRank(lse_name, lse, 2),
                         CheckType(o_name, o, ffi::DataType::F32, "float32"),
                         CheckType(lse_name, lse, ffi::DataType::F32, "float32")});
  if (!status.ok()) return status;
  const auto dims = o.dimensions();
  if (lse.dimensions()[0] == dims[0] && lse.dimensions()[1] == dims[1]) return Status::Ok();
  return Status::InvalidArgument(std::string(lse_name) + ": is " + ShapeText(lse) +
                                 ", does not fit " + o_name + " of " + ShapeText(o));
}

inline Status CheckSameShape(const char* name, const AnyBuffer& buffer, const AnyBuffer& o) {
  if (SameShape(buffer, o)) return Status::Ok();
  return Status::InvalidArgument(std::string(name) + ": is " + ShapeText(buffer) +
                                 ", the host's partial is " + ShapeText(o));
}

}  // namespace wscope
