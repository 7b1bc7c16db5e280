#include "thread.h"

#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>

#include <utility>

namespace wscope {
namespace {

// Blocks every signal for the calling thread; a thread started meanwhile inherits that.
class SignalBlock {
 public:
  SignalBlock() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalBlock() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalBlock(const SignalBlock&) = delete;
  SignalBlock& operator=(const SignalBlock&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

std::thread StartThread(std::string name, std::function<void()> body) {
  const SignalBlock block;
  return std::thread([name = std::move(name), body = std::move(body)] {
    prctl(PR_SET_NAME, name.c_str(), 0, 0, 0);
    body();
  });
}

}  // namespace wscope
