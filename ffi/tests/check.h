// All that the tests need of a test framework.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

namespace wscope {

[[noreturn]] inline void Fail(const char* file, int line, const std::string& what) {
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
  std::exit(1);
}

// True if `body` throws an `Error` whose text has `part` in it.
template <typename Error, typename Body>
bool Throws(const Body& body, const std::string& part) {
  try {
    body();
  } catch (const Error& error) {
    if (std::string(error.what()).find(part) != std::string::npos) return true;
    std::fprintf(stderr, "other text: %s\n", error.what());
  }
  return false;
}

}  // namespace wscope

#define CHECK(condition)                                       \
  do {                                                         \
    if (!(condition)) {                                        \
      ::wscope::Fail(__FILE__, __LINE__, "CHECK " #condition); \
    }                                                          \
  } while (false)
