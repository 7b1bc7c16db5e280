// Where a call runs: told by XLA's context, so that a target has one function for both platforms.
#pragma once

#include <optional>

#include "cuda_driver.h"
#include "xla/ffi/api/ffi.h"

namespace wscope {

struct Place {
  bool is_host;
  cuda::Stream stream;  // XLA's own, on CUDA.
};

struct OnHost {};
struct OnCuda {};

}  // namespace wscope

namespace xla::ffi {

template <>
struct CtxDecoding<wscope::OnHost> {
  using Type = wscope::Place;
  static std::optional<Type> Decode(const XLA_FFI_Api*, XLA_FFI_ExecutionContext*,
                                    DiagnosticEngine&) {
    return wscope::Place{true, nullptr};
  }
};

template <>
struct CtxDecoding<wscope::OnCuda> {
  using Type = wscope::Place;
  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* context,
                                    DiagnosticEngine& diagnostic) {
    const auto stream =
        CtxDecoding<PlatformStream<wscope::cuda::Stream>>::Decode(api, context, diagnostic);
    if (!stream) return std::nullopt;
    return wscope::Place{false, *stream};
  }
};

}  // namespace xla::ffi
