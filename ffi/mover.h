// Brings stored blocks from staging to their slots on a thread of its own.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "pool.h"
#include "status.h"
#include "thread.h"

namespace wscope {

// Memory for the blocks of one store. Fresh pages cost five times the copy that fills them, so the
// mover keeps what it has emptied for the next store of about the same size.
struct StagingBuffer {
  std::unique_ptr<uint8_t[]> bytes;
  int64_t capacity = 0;
};

struct StagedStore;

// Bytes of a store that wait on a device.
class DeviceStaging {
 public:
  virtual ~DeviceStaging() = default;
  // On the mover's thread: brings the blocks to their destinations, or says why not.
  virtual Status MoveHome(const StagedStore& store) = 0;
};

// Library-owned copy of the blocks of one store, and where they go. Holding the pools keeps them
// alive until the bytes are in place.
struct StagedStore {
  struct Destination {
    std::shared_ptr<Pool> pool;
    int layer;
    int slot;
  };

  int64_t block_bytes = 0;
  std::vector<Destination> destinations;
  StagingBuffer staging;                  // [destinations, block_bytes] ...
  std::unique_ptr<DeviceStaging> device;  // ... or this.

  int layer() const { return destinations.front().layer; }  // All go to one.
  int64_t size() const { return block_bytes * static_cast<int64_t>(destinations.size()); }
};

// First in, first out; the number of stores that are in place (`completed`) is the ticket counter.
class Mover {
 public:
  // Throws std::system_error when the system refuses the thread.
  Mover();
  // Lets go of a thread that is still busy: Drain first. Does nothing in a forked child.
  ~Mover();
  Mover(const Mover&) = delete;
  Mover& operator=(const Mover&) = delete;

  // A buffer of at least so many bytes, for a store. Throws std::bad_alloc.
  StagingBuffer TakeBuffer(int64_t num_bytes);
  void Enqueue(StagedStore store);

  // True when `completed` has reached `ticket`; false after the time or after Interrupt().
  bool WaitCompleted(int64_t ticket, int64_t deadline_ns);
  // Ends all present and future waits for tickets that are not reached. Stores go on.
  void Interrupt();
  // Waits until nothing is left to move; false if the deadline passed first.
  bool Drain(int64_t deadline_ns);

  // Why a store did not get home, if one did not; nothing moves afterwards.
  std::optional<std::string> failure() const;
  int64_t completed() const;
  // Layers with blocks whose staging is alive, the most there ever were, and their bytes.
  int staged_layers() const;
  int staged_high_water() const;
  int64_t staged_bytes() const;

  // Fault injection: sleeps so long before it moves a store.
  void set_delay_ms(int delay_ms);

 private:
  // Shared with the thread, which may outlive the mover.
  struct State {
    mutable std::mutex mutex;
    std::condition_variable changed;
    std::deque<StagedStore> stores;
    std::vector<StagingBuffer> spare;  // Emptied, at most kMaxSpare.
    int64_t enqueued = 0;
    int64_t completed = 0;
    std::map<int, int> staged;  // Layer -> its stores under way.
    int staged_high_water = 0;
    int64_t staged_bytes = 0;
    std::optional<std::string> failure;
    int delay_ms = 0;
    bool interrupted = false;
    bool leaving = false;
  };

  static void Loop(State& state);

  const Creator creator_;
  std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace wscope
