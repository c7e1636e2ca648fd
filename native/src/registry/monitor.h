// The engine's one lock: its condition variables, how long it was held, and the objects to destroy after its release.
//
// A thread holds it for a few milliseconds at most. Long work is done in slices, with the lock released in between
// (`breathe`). Objects that are discarded under the lock are destroyed after its release.
//
// clang checks the lock: fields that it guards have GUARDED_BY(engine_lock), functions that need it have
// REQUIRES(engine_lock).
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "histospec/stats.h"

// Annotations for clang's thread safety analysis (-Wthread-safety, in `make check`): which lock guards a field, and
// which lock a function needs. Other compilers ignore them. The names are those of clang's documentation.
#if defined(__clang__)
#define HISTOSPEC_CHECKED(attribute) __attribute__((attribute))
#else
#define HISTOSPEC_CHECKED(attribute)
#endif

#define CAPABILITY(name) HISTOSPEC_CHECKED(capability(name))
#define SCOPED_CAPABILITY HISTOSPEC_CHECKED(scoped_lockable)
#define GUARDED_BY(lock) HISTOSPEC_CHECKED(guarded_by(lock))
#define REQUIRES(...) HISTOSPEC_CHECKED(requires_capability(__VA_ARGS__))
#define ACQUIRE(...) HISTOSPEC_CHECKED(acquire_capability(__VA_ARGS__))
#define RELEASE(...) HISTOSPEC_CHECKED(release_capability(__VA_ARGS__))
#define ASSERT_CAPABILITY(lock) HISTOSPEC_CHECKED(assert_capability(lock))
#define NO_THREAD_SAFETY_ANALYSIS HISTOSPEC_CHECKED(no_thread_safety_analysis)

namespace histospec {

// Stands for the lock of the present engine in annotations, because clang cannot see that all parts of an engine refer
// to the same monitor. No thread locks two engines at a time.
class CAPABILITY("mutex") EngineLock {};
inline EngineLock engine_lock;

// For code that runs while another thread holds the lock and waits for it.
inline void assert_locked() ASSERT_CAPABILITY(engine_lock) {}

// A mutex that threads get in the order in which they ask for it. With a plain mutex, a worker that steps without a
// pause would keep all other threads waiting.
class FairMutex {
 public:
  void lock() {
    std::unique_lock<std::mutex> guard(mutex_);
    const std::uint64_t ticket = next_++;
    turn_.wait(guard, [&] { return ticket == serving_; });
  }
  void unlock() {
    bool waiting;
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      waiting = ++serving_ != next_;
    }
    if (waiting) turn_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable turn_;
  std::uint64_t next_ = 0;
  std::uint64_t serving_ = 0;
};

class Monitor {
 public:
  class Lock;
  class Unlocked;

  std::condition_variable_any to_build;  // wakes the builder
  std::condition_variable_any to_tidy;   // wakes the housekeeper
  std::condition_variable_any idle;      // wakes Engine::wait_until_built()

  // Releases the lock and takes it again, so that waiting threads get it.
  static void breathe(Lock& lock) REQUIRES(engine_lock);
  // Destroys `what` after the lock is released.
  void discard(std::shared_ptr<const void> what, std::size_t bytes) noexcept REQUIRES(engine_lock);
  // Whether there is more to destroy than a caller should wait for. Then only destroy_discarded() does so.
  bool discarded_much() const REQUIRES(engine_lock) { return discarded_bytes_ > kDiscardedBytes; }
  // If discarded_much(), releases the lock and destroys everything discarded.
  void destroy_discarded(Lock& lock) REQUIRES(engine_lock);
  const LockTimes& times() const REQUIRES(engine_lock) { return times_; }

 private:
  // At most this much is destroyed by the thread that releases the lock.
  static constexpr std::size_t kDiscardedBytes = 1 << 20;

  FairMutex mutex_;
  LockTimes times_ GUARDED_BY(engine_lock);
  std::vector<std::shared_ptr<const void>> discarded_ GUARDED_BY(engine_lock);
  std::size_t discarded_bytes_ GUARDED_BY(engine_lock) = 0;
};

// Holds the lock and measures for how long. Destroys a few discarded objects after the release.
class SCOPED_CAPABILITY Monitor::Lock {
 public:
  explicit Lock(Monitor& monitor) ACQUIRE(engine_lock) : monitor_(monitor) { lock(); }
  ~Lock() RELEASE() { unlock(); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

  // For condition variables; elsewhere use Unlocked.
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
