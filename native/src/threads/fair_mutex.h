// A mutex that threads get in the order in which they ask for it. With a plain mutex, a worker that steps without a
// pause would keep all other threads waiting.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace histospec {

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

}  // namespace histospec
