// What every call of the fake driver begins with.
#pragma once

struct CUctx_st {};

namespace fake_cuda {

enum Error {
  kOk = 0,
  kInvalidValue = 1,
  kNotInitialized = 3,
  kNoDevice = 101,
  kInvalidContext = 201,
  kInvalidHandle = 400,
  kNotReady = 600,
  kNotRegistered = 713,
};

// The context of this thread.
extern thread_local CUctx_st* current;

// The error that the call returns; if it is none it goes on.
int Enter(const char* name, bool in_context = true);
// Whether a call that destroys or waits does so in spite of the error.
bool Effective(int error);

void SetReady();
int LiveModules();
void FailAt(int n, int error, bool lasting);
const char* Failed();

}  // namespace fake_cuda
