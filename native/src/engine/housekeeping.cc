// What keeps the engine within its memory and its lock free: slices, evictions, what a second thread does meanwhile.
#include <time.h>

#include <algorithm>

#include "engine/state.h"

namespace histospec {
namespace {

// The share of the memory budget, one in so many, that the index of a namespace keeps when the budget is short.
constexpr std::size_t kSharedPart = 8;

// What is evicted while others wait for the lock, in problems with short prompts: about a millisecond.
constexpr std::size_t kEvictSlice = 256;

constexpr std::size_t kPromptSlice = 2048;  // tokens of a prompt that cost as much as a problem

// What a thread that gives the lock back destroys itself; what is more, it leaves to the housekeeper.
constexpr std::size_t kDiscardedBytes = 1 << 20;

// What ends a text unlinks at once; the housekeeper does the rest.
constexpr std::size_t kTidyAtOnce = 1 << 11;

// Responses may wait for their segment until they would fill one part in so many of the budget, at so many bytes a
// token of live text; never fewer tokens than a few responses have.
constexpr std::size_t kWaitingPart = 4;
constexpr std::size_t kWaitingBytes = 44;
constexpr std::size_t kFewTokens = 1 << 15;

double thread_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace

void Engine::State::Lock::lock() {
  state_.mutex_.lock();
  held_ = true;
  since_ = thread_seconds();
}

void Engine::State::Lock::unlock() {
  std::vector<std::shared_ptr<const void>> mine;
  if (state_.discarded_bytes_ <= kDiscardedBytes) {
    mine.swap(state_.discarded_);
    state_.discarded_bytes_ = 0;
  } else {
    state_.house_.notify_one();
  }
  LockTimes& times = state_.lock_times;
  const double held = thread_seconds() - since_;
  ++times.counts[static_cast<std::size_t>(std::ranges::lower_bound(kLockBounds, held) - kLockBounds.begin())];
  times.seconds += held;
  times.longest = std::max(times.longest, held);
  held_ = false;
  state_.mutex_.unlock();
}

void Engine::State::breathe(Lock& lock) {
  lock.unlock();
  lock.lock();
}

void Engine::State::discard(std::shared_ptr<const void> what, std::size_t bytes) noexcept {
  try {
    discarded_.push_back(std::move(what));
    discarded_bytes_ += bytes;
  } catch (const std::bad_alloc&) {  // then it is destroyed now
  }
}

// Destroys what was discarded, with the lock released meanwhile, where that is more than a caller should wait for.
void Engine::State::destroy_discarded(Lock& lock) {
  if (discarded_bytes_ <= kDiscardedBytes) return;
  std::vector<std::shared_ptr<const void>> mine;
  mine.swap(discarded_);
  discarded_bytes_ = 0;
  lock.unlock();
  mine.clear();
  lock.lock();
}

// True if there is more to do.
bool Engine::State::tidy_some(Problem& problem, std::size_t work) {
  const std::size_t before = problem.live->bytes();
  const bool more = change_live(problem, [work](LiveText& live) { return live.tidy(work); });
  try {
    if (auto freed = problem.live->take_freed()) discard(std::move(freed), before - problem.live->bytes());
  } catch (const std::bad_alloc&) {  // it waits for the next time, or for the end of the live text
  }
  return more;
}

// Gives back what forgotten text of a running group held.
void Engine::State::tidy(const std::shared_ptr<Problem>& problem) {
  if (problem->untidy || !tidy_some(*problem, kTidyAtOnce)) return;
  try {
    untidy_.push_back(problem);
    problem->untidy = true;
    house_.notify_one();
  } catch (const std::bad_alloc&) {  // the next text that ends takes it along
  }
}

void Engine::State::keep_house() {
  Lock lock(*this);
  while (true) {
    house_.wait(lock, [this] { return stopping_ || over_ || !untidy_.empty() || discarded_bytes_ > kDiscardedBytes; });
    if (stopping_) return;
    destroy_discarded(lock);
    if (over_) over_ = !evict_some();
    if (!untidy_.empty()) {
      const std::shared_ptr<Problem> problem = std::move(untidy_.front());
      untidy_.pop_front();
      problem->untidy = false;
      if (problem->live && tidy_some(*problem, LiveText::kSlice)) {
        untidy_.push_front(problem);  // where it was: no memory is needed
        problem->untidy = true;
      }
    }
    if (!over_ && untidy_.empty()) idle.notify_all();
    breathe(lock);
  }
}

std::uint64_t Engine::State::drop(Lock& lock, const std::shared_ptr<Namespace>& space) {
  const std::uint64_t number = ++drops_;
  std::uint64_t responses = 0;
  std::size_t work = 0;
  // Those that were visited, and those that are new, stand at the end.
  while (!space->members.empty() && space->members.front()->dropped < number) {
    Problem& problem = *space->members.front();
    space->members.splice(space->members.end(), space->members, space->members.begin());
    problem.dropped = number;
    work += 1 + problem.key.prompt.size() / kPromptSlice;
    responses += forget(problem);
    if (work < kEvictSlice) continue;
    work = 0;
    breathe(lock);
  }
  return responses;
}

// True: the budget holds, or nothing is left to evict.
bool Engine::State::evict_some() {
  const auto over = [this] { return memory_bytes() > options.memory_bytes; };
  if (!over() || evictable_bytes() <= exhausted_at_) return true;
  exhausted_at_ = 0;
  std::size_t work = 0;
  const auto tired = [&work](std::size_t more) { return (work += more) >= kEvictSlice; };
  const auto shrink = [this](Namespace& space) {
    const bool shrunk = space.index.shrink();
    book(space);
    return shrunk;
  };
  // What problems share is a fallback: it may not drive out their own history.
  for (const auto& [name, space] : spaces) {
    while (over() && space->index.bytes() > options.memory_bytes / kSharedPart && shrink(*space)) {
      if (tired(kEvictSlice / 4)) return !over();
    }
  }
  // Twins are a second copy of what the history has: they go before any history does.
  while (over() && !twinned_.empty()) {
    end_twins(*twinned_.front());
    if (tired(1)) return !over();
  }
  auto least_recent = recency_.begin();
  while (over() && least_recent != recency_.end()) {
    Problem& problem = **least_recent++;
    if (problem.live) continue;
    const std::size_t its_work = 1 + problem.key.prompt.size() / kPromptSlice;
    Namespace& space = *problem.owner;
    space.counters.evicted_responses += forget(problem);
    has_evicted = true;
    if (space.problems.empty()) {
      space.forget();
      book(space);
    }
    if (tired(its_work)) return !over();
  }
  // Only problems in use are left: they lose their oldest responses.
  for (Problem* problem : recency_) {
    while (over() && !problem->segments->empty()) {
      const Segments& segments = *problem->segments;
      problem->owner->counters.evicted_responses += segments.front()->extents().size();
      publish(*problem, std::make_shared<const Segments>(segments.begin() + 1, segments.end()));
      has_evicted = true;
      if (tired(1)) return !over();
    }
  }
  for (const auto& [name, space] : spaces) {
    while (over() && shrink(*space)) {
      if (tired(kEvictSlice / 4)) return !over();
    }
  }
  if (over()) exhausted_at_ = evictable_bytes();
  return true;
}

void Engine::State::make_room(Lock& lock) {
  bool done;
  do {
    done = evict_some();
    destroy_discarded(lock);  // here, not by the housekeeper: who fills memory waits until there is some
    if (!done) breathe(lock);
  } while (!done);
}

void Engine::State::relieve() {
  if (over_ || evict_some()) return;
  over_ = true;
  house_.notify_one();
}

std::size_t Engine::State::most_waiting() const {
  return std::max(kFewTokens, options.memory_bytes / kWaitingPart / kWaitingBytes);
}

bool Engine::State::congested() const { return over_ || waiting_tokens_ > most_waiting(); }

}  // namespace histospec
