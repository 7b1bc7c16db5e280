// A driver without a device, for tests: what it offers beyond the driver's own functions, to be
// found by dlsym in the library that GetDriver() opens. Its rules are those of the real one, and
// where that one may be kind it is strict:
//   - Work is done by a thread for each stream, behind the calls; device and pinned memory is full
//     of 0xFF at first. An event means what was recorded last when the call that names it is made.
//   - What takes effect in a context is refused with 201 on a thread that has none.
//   - A copy between memory that is not what the call claims is refused with 1. Memory that is
//   freed
//     while a copy may use it ends the process, as does a call from within a callback.
//   - A stream that waits for memory does nothing else until the number is there, and the memory
//   is
//     in use until then.
//   - What destroys or waits does so even if it returns an error.
#pragma once

extern "C" {

// Objects that are alive, and operations that no stream has ended.
struct FakeCudaLive {
  int streams, events, device, pinned, registered, modules, pending;
};

FakeCudaLive fake_cuda_live();
// The n-th call from now on returns `error`, and if it is `lasting` all after it; 0: none does.
void fake_cuda_fail_at(int n, int error, bool lasting);
// The name of the call that did; null if it has not come.
const char* fake_cuda_failed();
// Every operation of a stream begins with a random delay up to `most` microseconds.
void fake_cuda_delay_us(int most);
// While it is not 0 no stream begins another operation.
void fake_cuda_hold(int on);
// Whether the device says that its streams can write and wait for memory; at first it does.
void fake_cuda_stream_memory(int on);
// Whether the device takes our kernels; at first it does.
void fake_cuda_kernels(int on);

}  // extern "C"
