// The engine's one lock: what waits for it, how long it was held, and what is destroyed behind it.
//
// It is held for a few milliseconds at most, whatever is asked for: long work is done in slices, others have their turn
// between two of them (`breathe`), and what is thrown away under the lock is destroyed after it.
//
// clang checks who holds it. What it guards says GUARDED_BY(engine_lock); who needs it says REQUIRES(engine_lock).
#pragma once

#include <condition_variable>
#include <memory>
#include <vector>

#include "histospec/engine.h"
#include "threads/annotations.h"
#include "threads/fair_mutex.h"

namespace histospec {

// In annotations, the lock of the engine at hand: clang could not see that the monitors to which the parts of an engine
// refer are one. No thread locks two engines at a time.
class CAPABILITY("mutex") EngineLock {};
inline EngineLock engine_lock;

// For code that runs while another thread holds the lock and waits for it.
inline void assert_locked() ASSERT_CAPABILITY(engine_lock) {}

class Monitor {
 public:
  class Lock;
  class Unlocked;

  std::condition_variable_any to_build;  // the builder waits here, ...
  std::condition_variable_any to_tidy;   // ... the housekeeper here, ...
  std::condition_variable_any idle;      // ... and here, who waits for both to have nothing to do

  // Lets the others who wait for the lock have it.
  static void breathe(Lock& lock) REQUIRES(engine_lock);
  // Destroys it once the lock is released.
  void discard(std::shared_ptr<const void> what, std::size_t bytes) noexcept REQUIRES(engine_lock);
  // Whether there is more to destroy than a caller should wait for. Then nobody does it but destroy_discarded().
  bool discarded_much() const REQUIRES(engine_lock) { return discarded_bytes_ > kDiscardedBytes; }
  // Destroys what was discarded, with the lock released meanwhile, where that is much.
  void destroy_discarded(Lock& lock) REQUIRES(engine_lock);
  const LockTimes& times() const REQUIRES(engine_lock) { return times_; }

 private:
  // What a thread that gives the lock back destroys itself.
  static constexpr std::size_t kDiscardedBytes = 1 << 20;

  FairMutex mutex_;
  LockTimes times_ GUARDED_BY(engine_lock);
  std::vector<std::shared_ptr<const void>> discarded_ GUARDED_BY(engine_lock);
  std::size_t discarded_bytes_ GUARDED_BY(engine_lock) = 0;
};

// Holds the lock, and measures for how long. What little was discarded meanwhile is destroyed behind it.
class SCOPED_CAPABILITY Monitor::Lock {
 public:
  explicit Lock(Monitor& monitor) ACQUIRE(engine_lock) : monitor_(monitor) { lock(); }
  ~Lock() RELEASE() { unlock(); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

  // For condition variables; else Unlocked.
  void lock() NO_THREAD_SAFETY_ANALYSIS;
  void unlock() NO_THREAD_SAFETY_ANALYSIS;

 private:
  Monitor& monitor_;
  double since_ = 0;  // seconds of this thread's CPU
};

// Releases a lock for a while.
class SCOPED_CAPABILITY Monitor::Unlocked {
 public:
  explicit Unlocked(Lock& lock) RELEASE(engine_lock) : lock_(lock) { lock_.unlock(); }
  ~Unlocked() RELEASE() { lock_.lock(); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  Lock& lock_;
};

}  // namespace histospec
