#include "workers.h"

#include <algorithm>
#include <utility>

namespace histospec {

Workers::~Workers() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  started_.notify_all();
  for (std::thread& thread : others_) thread.join();
}

void Workers::share(std::size_t size, Job job) {
  while (others_.size() + 1 < static_cast<std::size_t>(threads_)) {
    others_.emplace_back([this, worker = static_cast<int>(others_.size()) + 1] { loop(worker); });
  }
  {
    const std::lock_guard lock(mutex_);
    job_ = std::move(job);
    size_ = size;
    taken_ = 0;
    busy_ = static_cast<int>(others_.size());
    ++round_;
  }
  started_.notify_all();
  take_pieces(0);
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [this] { return busy_ == 0; });
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void Workers::take_pieces(int worker) {
  try {
    for (std::size_t first; (first = taken_.fetch_add(kPiece)) < size_;) {
      job_(worker, first, std::min(first + kPiece, size_));
    }
  } catch (...) {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = std::current_exception();
  }
}

void Workers::loop(int worker) {
  std::uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    started_.wait(lock, [&] { return stopping_ || round_ != seen; });
    if (stopping_) return;
    seen = round_;
    lock.unlock();
    take_pieces(worker);
    lock.lock();
    if (--busy_ == 0) finished_.notify_one();
  }
}

}  // namespace histospec
