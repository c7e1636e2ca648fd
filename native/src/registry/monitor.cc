#include "registry/monitor.h"

#include <time.h>

#include <algorithm>
#include <new>

namespace histospec {
namespace {

double thread_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace

void Monitor::Lock::lock() {
  monitor_.mutex_.lock();
  since_ = thread_seconds();
}

void Monitor::Lock::unlock() {
  std::vector<std::shared_ptr<const void>> mine;
  if (monitor_.discarded_much()) {
    monitor_.to_tidy.notify_one();
  } else {
    mine.swap(monitor_.discarded_);
    monitor_.discarded_bytes_ = 0;
  }
  LockTimes& times = monitor_.times_;
  const double held = thread_seconds() - since_;
  ++times.counts[static_cast<std::size_t>(std::ranges::lower_bound(kLockBounds, held) - kLockBounds.begin())];
  times.seconds += held;
  times.longest = std::max(times.longest, held);
  monitor_.mutex_.unlock();
}

void Monitor::breathe(Lock& lock) { const Unlocked others(lock); }

void Monitor::discard(std::shared_ptr<const void> what, std::size_t bytes) noexcept {
  try {
    discarded_.push_back(std::move(what));
    discarded_bytes_ += bytes;
  } catch (const std::bad_alloc&) {  // then it is destroyed now, under the lock
  }
}

void Monitor::destroy_discarded(Lock& lock) {
  if (!discarded_much()) return;
  std::vector<std::shared_ptr<const void>> mine;
  mine.swap(discarded_);
  discarded_bytes_ = 0;
  const Unlocked others(lock);
  mine.clear();
}

}  // namespace histospec
