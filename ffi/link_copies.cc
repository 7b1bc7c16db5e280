#include "link_copies.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "clock.h"
#include "cuda_driver.h"

namespace wscope {
namespace {

// Walks through the committed slots of a pool in chunks, layer by layer, over and over.
struct Walk {
  const Pool& pool;
  const int64_t chunk_bytes;
  int layer = 0;
  int64_t offset = 0;

  const uint8_t* from() const { return pool.Block(layer, 0) + offset; }
  int64_t bytes() const { return std::min(chunk_bytes, pool.committed_bytes() - offset); }
  void Advance() {
    offset += bytes();
    if (offset < pool.committed_bytes()) return;
    offset = 0;
    layer = (layer + 1) % pool.num_layers();
  }
};

class HostLink : public Link {
 public:
  explicit HostLink(int64_t chunk_bytes) : chunk_bytes_(chunk_bytes), to_(1, 2, chunk_bytes) {
    to_.Commit(2);
  }

  double Run(const Pool& from, std::optional<double> rate, int64_t until_ns) override {
    Walk walk{from, chunk_bytes_};
    const int64_t start = NowNs();
    Pace pace(rate, start);
    int64_t end = start, bytes = 0;
    for (int slot = 0; pace.Wait(until_ns); slot = 1 - slot) {
      pace.Begin(walk.bytes(), NowNs());
      uint8_t* const to = to_.Block(0, slot);
      std::memcpy(to, walk.from(), walk.bytes());
      asm volatile("" : : "r"(to) : "memory");  // Or it is seen that nobody reads the copy.
      bytes += walk.bytes();
      walk.Advance();
      end = NowNs();
    }
    return end > start ? 1e9 * bytes / (end - start) : 0.0;
  }

 private:
  const int64_t chunk_bytes_;
  Pool to_;
};

class CudaLink : public Link {
 public:
  CudaLink(int device, int64_t chunk_bytes)
      : chunk_bytes_(chunk_bytes), scope_(cuda::PrimaryContext(device)) {
    Require(
        First({scope_.status(), cuda::DeviceBuffer::Make(2 * chunk_bytes, &to_), stream_.Make()}));
  }

  double Run(const Pool& from, std::optional<double> rate, int64_t until_ns) override {
    const int64_t ahead = rate ? kAheadAtRate : kAhead;
    Walk walk{from, chunk_bytes_};
    Pace pace(rate, NowNs());
    Status status = began_.Record(stream_.get());
    int64_t begun = 0, ended = 0, bytes = 0;
    while (status.ok() && NowNs() < until_ns) {
      if (begun - ended < ahead) {
        if (!pace.Wait(until_ns)) break;
        pace.Begin(walk.bytes(), NowNs());
        status = Begin(walk, begun++);
        walk.Advance();
      } else if (const Copy& oldest = copies_[ended % kAhead]; oldest.ended.Done()) {
        bytes += oldest.bytes;
        ++ended;
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      }
    }
    // After a failure too: copies may be under way.
    const cuda::Driver& driver = *cuda::GetDriver();
    Require(First({status, cuda::Check(driver.StreamSynchronize(stream_.get()), "copy")}));
    // The copy that was under way counts, or a link that others keep busy would seem to give
    // nothing; those behind it began too late.
    if (ended < begun) bytes += copies_[ended++ % kAhead].bytes;
    const int64_t ns = ended > 0 ? copies_[(ended - 1) % kAhead].ended.Since(began_) : 0;
    return ns > 0 ? 1e9 * bytes / ns : 0.0;
  }

 private:
  static constexpr int kAhead = 8;  // Copies enqueued, so that the link never waits for us.
  // The device makes the copies of one direction one after the other: any enqueued ahead hold up
  // those of others for as long as they take.
  static constexpr int kAheadAtRate = 1;
  struct Copy {
    cuda::Event ended;
    int64_t bytes = 0;
  };

  static void Require(const Status& status) {
    if (!status.ok()) throw std::runtime_error("CUDA: " + status.text);
  }

  Status Begin(const Walk& walk, int64_t number) {
    Copy& copy = copies_[number % kAhead];
    copy.bytes = walk.bytes();
    Status status;
    for (int64_t done = 0; status.ok() && done < copy.bytes;) {
      const int64_t run = walk.pool.PinnedRun(walk.offset + done, copy.bytes - done);
      const cuda::DevicePtr to = to_->data() + number % 2 * walk.chunk_bytes + done;
      status = cuda::Check(
          cuda::GetDriver()->MemcpyHtoDAsync(to, walk.from() + done, run, stream_.get()), "copy");
      done += run;
    }
    return status.ok() ? copy.ended.Record(stream_.get()) : status;
  }

  const int64_t chunk_bytes_;
  const cuda::Scope scope_;
  std::shared_ptr<cuda::DeviceBuffer> to_;
  cuda::OwnStream stream_;
  cuda::Event began_;
  std::array<Copy, kAhead> copies_;
};

}  // namespace

bool Pace::Wait(int64_t until_ns) const {
  for (int64_t now = NowNs(); now < until_ns; now = NowNs()) {
    if (Due(now)) return true;
    const double left_ns = due_ns_ - static_cast<double>(now - start_ns_);
    const auto until_end_ns = static_cast<double>(until_ns - now);
    const auto sleep_ns = static_cast<int64_t>(std::min(left_ns, until_end_ns));
    std::this_thread::sleep_for(std::chrono::nanoseconds(sleep_ns));
  }
  return false;
}

void Pace::Begin(int64_t bytes, int64_t now_ns) {
  if (!rate_) return;
  const double took_ns = 1e9 * static_cast<double>(bytes) / *rate_;
  due_ns_ = std::max(due_ns_, static_cast<double>(now_ns - start_ns_) - took_ns) + took_ns;
}

std::unique_ptr<Link> MakeLink(std::optional<int> device, int64_t chunk_bytes) {
  if (device) return std::make_unique<CudaLink>(*device, chunk_bytes);
  return std::make_unique<HostLink>(chunk_bytes);
}

}  // namespace wscope
