// The outcome of a checked call, free of XLA: handlers.cc turns it into an ffi::Error.
#pragma once

#include <initializer_list>
#include <string>
#include <utility>

namespace wscope {

struct Status {
  enum class Kind { kOk, kInvalidArgument, kFailedPrecondition, kResourceExhausted, kInternal };

  Kind kind = Kind::kOk;
  std::string text;

  bool ok() const { return kind == Kind::kOk; }

  static Status Ok() { return {}; }
  static Status InvalidArgument(std::string text) {
    return {Kind::kInvalidArgument, std::move(text)};
  }
  static Status FailedPrecondition(std::string text) {
    return {Kind::kFailedPrecondition, std::move(text)};
  }
  static Status ResourceExhausted(std::string text) {
    return {Kind::kResourceExhausted, std::move(text)};
  }
  static Status Internal(std::string text) { return {Kind::kInternal, std::move(text)}; }
};

// The first status that is not OK; all of them have been tried.
inline Status First(std::initializer_list<Status> statuses) {
  for (const Status& status : statuses) {
    if (!status.ok()) return status;
  }
  return Status::Ok();
}

}  // namespace wscope
