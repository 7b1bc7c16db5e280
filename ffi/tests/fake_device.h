// A test's side of the fake driver: what XLA would own.
#pragma once

#include <dlfcn.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <thread>

#include "check.h"
#include "clock.h"
#include "cuda_driver.h"
#include "fake_cuda.h"

namespace wscope {

inline const cuda::Driver& Cu() { return *cuda::GetDriver(); }

// The fake's own functions.
class Fake {
 public:
  static const Fake& Get() {
    static const Fake fake;
    return fake;
  }

  decltype(&fake_cuda_live) live;
  decltype(&fake_cuda_fail_at) fail_at;
  decltype(&fake_cuda_failed) failed;
  decltype(&fake_cuda_delay_us) delay_us;
  decltype(&fake_cuda_hold) hold;
  decltype(&fake_cuda_stream_memory) stream_memory;
  decltype(&fake_cuda_kernels) kernels;

 private:
  Fake() {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW);
    CHECK(library != nullptr);
    Find(library, "fake_cuda_live", &live);
    Find(library, "fake_cuda_fail_at", &fail_at);
    Find(library, "fake_cuda_failed", &failed);
    Find(library, "fake_cuda_delay_us", &delay_us);
    Find(library, "fake_cuda_hold", &hold);
    Find(library, "fake_cuda_stream_memory", &stream_memory);
    Find(library, "fake_cuda_kernels", &kernels);
  }

  template <typename Function>
  static void Find(void* library, const char* name, Function* function) {
    *function = reinterpret_cast<Function>(dlsym(library, name));
    CHECK(*function != nullptr);  // Else this is a real driver.
  }
};

inline std::string Text(const FakeCudaLive& live) {
  return std::to_string(live.streams) + " streams, " + std::to_string(live.events) + " events, " +
         std::to_string(live.device) + " device and " + std::to_string(live.pinned) +
         " pinned buffers, " + std::to_string(live.registered) + " registered ranges, " +
         std::to_string(live.modules) + " modules";
}

// The same objects; what is pending ends by itself.
inline bool operator==(const FakeCudaLive& a, const FakeCudaLive& b) { return Text(a) == Text(b); }

// Waits for threads that end by themselves.
inline bool BecomesLive(const FakeCudaLive& want) {
  for (int i = 0; i < 10'000; ++i) {
    if (Fake::Get().live() == want) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  std::fprintf(stderr, "%s; want %s\n", Text(Fake::Get().live()).c_str(), Text(want).c_str());
  return false;
}

// Returns when that is so, or when nothing has changed for a while.
inline void SettlesAt(const FakeCudaLive& want) {
  FakeCudaLive last = Fake::Get().live();
  for (int same = 0; same < 100 && !(last == want); ++same) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const FakeCudaLive now = Fake::Get().live();
    if (!(now == last)) same = 0;
    last = now;
  }
}

// Makes the device's context current on this thread, as XLA does on those that it calls from.
inline void EnterContext() {
  cuda::Context context = nullptr;
  int device = -1;
  CHECK(Cu().Init(0) == 0 && Cu().DeviceGet(&device, 0) == 0);
  CHECK(Cu().DevicePrimaryCtxRetain(&context, device) == 0 && Cu().CtxSetCurrent(context) == 0);
}

// Runs `body` on a thread without a context, as Python's may be.
template <typename Body>
void Elsewhere(const Body& body) {
  std::thread thread(body);
  thread.join();
}

// XLA's memory: the device's, or the host's. The fake's device memory can be read and written here
// as well, when no stream does.
class Array {
 public:
  Array(bool device, size_t bytes) : device_(device) {
    if (device) {
      CHECK(Cu().MemAlloc(&address_, bytes) == 0);
    } else {
      host_.reset(new uint8_t[bytes]);
      std::memset(host_.get(), 0xff, bytes);
      address_ = cuda::Address(host_.get());
    }
  }
  ~Array() {
    if (device_) Cu().MemFree(address_);
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  uint8_t* data() const { return reinterpret_cast<uint8_t*>(address_); }
  float* floats() const { return reinterpret_cast<float*>(address_); }

 private:
  const bool device_;
  cuda::DevicePtr address_ = 0;
  std::unique_ptr<uint8_t[]> host_;
};

}  // namespace wscope
