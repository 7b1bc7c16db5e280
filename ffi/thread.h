// Threads of the library.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <functional>
#include <string>
#include <thread>

namespace wscope {

// Starts a thread named `name` (at most 15 characters are shown) in which every signal is blocked,
// so that signals go to the threads of the program. Throws std::system_error when the system
// refuses.
std::thread StartThread(std::string name, std::function<void()> body);

// The process that made an object. Threads and locks do not survive fork(), so an object that has
// some must be left alone in a child.
class Creator {
 public:
  bool IsThisProcess() const { return getpid() == pid_; }
  // What to tell the user of a child; `what` is the object's name.
  static std::string ForkText(const char* what) {
    return std::string(what) +
           ": made by the parent of this forked process, whose threads did not come along; start "
           "the child with the 'spawn' or 'forkserver' method and make a new one there";
  }

 private:
  pid_t pid_ = getpid();
};

}  // namespace wscope
