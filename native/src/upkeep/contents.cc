#include "upkeep/contents.h"

#include <new>

namespace histospec {

void Contents::publish(Problem& problem, std::shared_ptr<const Segments> segments) {
  const MemoryLedger::Change booked(ledger, problem, Problem::kSegments);
  problem.segments.swap(segments);
  monitor.discard(std::move(segments), booked.before().bytes);
  if (problem.shelf == Tenant::kBare && !problem.segments->empty()) registry.shelve(problem, Tenant::kBusy);
}

void Contents::add_twin(Problem& problem, Twins::Key key, std::int64_t epoch, std::shared_ptr<const Twin> twin,
                        Arrival arrival) {
  const MemoryLedger::Change booked(ledger, problem, Problem::kTwins);
  try {
    if (!problem.twins) {
      auto twins = std::make_unique<Twins>();
      registry.list_twins(problem, arrival == Arrival::kAhead && !problem.live);
      problem.twins = std::move(twins);
    }
    problem.twins->add(key, epoch, std::move(twin), arrival != Arrival::kNew);
  } catch (const std::bad_alloc&) {
    // The history has the response, so its drafts are only shorter.
  }
}

void Contents::end_twins(Problem& problem) {
  if (!problem.twins) return;
  const MemoryLedger::Change booked(ledger, problem, Problem::kTwins);
  registry.unlist_twins(problem);
  problem.twins.reset();  // now, because sessions use a twin as long as it exists
}

void Contents::end_live(Problem& problem) {
  const MemoryLedger::Change booked(ledger, problem, Problem::kLive);
  lingering_.erase(&problem);
  try {
    monitor.discard(std::shared_ptr<const LiveText>(std::move(problem.live)), booked.before().bytes);
  } catch (const std::bad_alloc&) {
  }
  problem.live.reset();
  // Problems that were used less recently are gone, or the evictor would not have passed this one.
  if (problem.shelf != Tenant::kRecent) registry.shelve(problem, Tenant::kRecent, true);
}

std::size_t Contents::forget(Problem& problem) {
  const std::size_t responses =
      problem.holding(Problem::kSegments).responses + problem.holding(Problem::kLive).responses;
  ++problem.generation;
  publish(problem, std::make_shared<const Segments>());
  end_twins(problem);
  if (problem.live) {
    change_live(problem, [](LiveText& live) { live.dissolve(live.finished_texts()); });
    if (problem.live->running() > 0) {
      lingering_.erase(&problem);
      tidy(problem.shared_from_this());
      return responses;
    }
    end_live(problem);
  }
  registry.erase(problem);
  return responses;
}

// Returns true if there is more to do.
bool Contents::tidy_some(Problem& problem, std::size_t work) {
  const std::size_t before = problem.live->bytes();
  const bool more = change_live(problem, [work](LiveText& live) { return live.tidy(work); });
  try {
    if (auto freed = problem.live->take_freed()) monitor.discard(std::move(freed), before - problem.live->bytes());
  } catch (const std::bad_alloc&) {  // the next call, or the end of the live text, frees it
  }
  return more;
}

void Contents::tidy(const std::shared_ptr<Problem>& problem) {
  if (problem->untidy || !tidy_some(*problem, kTidyAtOnce)) return;
  try {
    untidy_.push_back(problem);
    problem->untidy = true;
    monitor.to_tidy.notify_one();
  } catch (const std::bad_alloc&) {  // the next call of tidy() frees it
  }
}

void Contents::tidy_next() {
  if (untidy_.empty()) return;
  const std::shared_ptr<Problem> problem = std::move(untidy_.front());
  untidy_.pop_front();
  problem->untidy = false;
  if (problem->live && tidy_some(*problem, LiveText::kSlice)) {
    untidy_.push_front(problem);  // to its old place, which needs no memory
    problem->untidy = true;
  }
}

void Contents::linger(Problem& problem) {
  try {
    lingering_.insert(&problem);
  } catch (const std::bad_alloc&) {  // its text waits for the end of its group
  }
}

}  // namespace histospec
