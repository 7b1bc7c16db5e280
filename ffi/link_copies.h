// Copies out of a pool over the link, over and over: for benchmarks and for calibration.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "pool.h"

namespace wscope {

// When copies may begin that are to take a part of the link only: none before those ahead of it
// have had their time at that rate. One that begins late may be followed at once by one more, but a
// slow stretch is not followed by a burst.
class Pace {
 public:
  // Bytes a second, above 0; without, every copy is due at once.
  Pace(std::optional<double> rate, int64_t start_ns) : rate_(rate), start_ns_(start_ns) {}

  // Whether the next copy may begin.
  bool Due(int64_t now_ns) const { return static_cast<double>(now_ns - start_ns_) >= due_ns_; }
  // Sleeps until it may. False if `until_ns` comes first.
  bool Wait(int64_t until_ns) const;
  // A copy of so many bytes begins.
  void Begin(int64_t bytes, int64_t now_ns);

 private:
  const std::optional<double> rate_;
  const int64_t start_ns_;
  double due_ns_ = 0.0;  // From the start; infinite where the rate is next to nothing.
};

// Copies chunks of a pool's committed slots to two places in turn.
class Link {
 public:
  virtual ~Link() = default;
  // Copies until `until_ns`: at `rate` bytes a second and few at a time, or without one as fast as
  // it goes. Bytes a second until the last copy ended that began before then and had nothing in
  // front; 0 if none began. Throws std::runtime_error when a copy fails.
  virtual double Run(const Pool& from, std::optional<double> rate, int64_t until_ns) = 0;
};

// A link to `device`, or without one to memory. It may need the workers. Throws std::runtime_error
// without such a device or room on it; OutOfMemory.
std::unique_ptr<Link> MakeLink(std::optional<int> device, int64_t chunk_bytes);

}  // namespace wscope
