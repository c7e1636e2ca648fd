#include "threads/workers.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace histospec {
namespace {

// Waits without sleeping, for a short time. What a thread waits for, the last piece or an announced run, mostly takes
// less time than to sleep and to wake. Waiting longer would take the core from other threads for nothing, because the
// next step of a worker is a network round trip away.
template <typename Done>
bool wait_awake(Done done) {
  constexpr std::chrono::microseconds kPatience{50};
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (!done()) {
    if (std::chrono::steady_clock::now() >= end) return false;
    std::this_thread::yield();
  }
  return true;
}

}  // namespace

Workers::~Workers() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  started_.notify_all();
  for (std::thread& thread : others_) thread.join();
}

void Workers::start() {
  while (others_.size() + 1 < taken_.size()) {
    others_.emplace_back([this, worker = static_cast<int>(others_.size()) + 1] { loop(worker); });
  }
}

void Workers::announce(std::size_t size) {
  if (!shared(size)) return;
  start();
  {
    const std::lock_guard lock(mutex_);
    ++announced_;
  }
  started_.notify_all();
}

void Workers::share(std::size_t size, Job job) {
  start();
  {
    const std::lock_guard lock(mutex_);
    job_ = std::move(job);
    size_ = size;
    for (std::size_t worker = 0; worker < taken_.size(); ++worker) taken_[worker].until = part(worker);
    open_ = true;
    ++round_;
  }
  started_.notify_all();
  take_pieces(0);
  {
    const std::lock_guard lock(mutex_);
    open_ = false;
  }
  const auto finished = [this] { return busy_ == 0; };
  wait_awake(finished);
  std::unique_lock lock(mutex_);
  finished_.wait(lock, finished);
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void Workers::take_pieces(int worker) {
  try {
    for (std::size_t i = 0; i < taken_.size(); ++i) {
      const std::size_t whose = (static_cast<std::size_t>(worker) + i) % taken_.size();
      const std::size_t end = part(whose + 1);
      for (std::size_t first; (first = taken_[whose].until.fetch_add(kPiece)) < end;) {
        job_(worker, first, std::min(first + kPiece, end));
      }
    }
  } catch (...) {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = std::current_exception();
  }
}

void Workers::loop(int worker) {
  // Each thread compares these with numbers that only grow, so that no thread takes another's wake-up.
  std::uint64_t seen = 0, heard = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    started_.wait(lock, [&] { return stopping_ || round_ != seen || announced_ != heard; });
    ++woken_;
    for (bool more = true; more;) {
      if (stopping_) return;
      heard = announced_;
      const bool joins = open_ && round_ != seen;
      seen = round_;
      if (joins) ++busy_;
      lock.unlock();
      if (joins) take_pieces(worker);
      if (joins && --busy_ == 0) {
        const std::lock_guard finishing(mutex_);  // so that share() cannot miss it between its check and its sleep
        finished_.notify_one();
      }
      more = wait_awake([&] { return round_ != seen || stopping_; });
      lock.lock();
    }
  }
}

}  // namespace histospec
