// The contents of an engine: its problems, in the registry; the lock that guards them; and the ledger that counts them.
// Every change of their segments, live text and twins is made, and booked, here.
#pragma once

#include <deque>
#include <memory>
#include <span>
#include <unordered_set>

#include "histospec/options.h"
#include "registry/registry.h"

namespace histospec {

class Contents {
 public:
  // `index_tokens`: how many tokens the index of a namespace may hold.
  explicit Contents(std::size_t index_tokens) : registry(ledger, index_tokens) {}

  Monitor monitor;
  MemoryLedger ledger;
  Registry registry;

  // How many problems with short prompts are forgotten in about a millisecond, before the lock is released.
  static constexpr std::size_t kForgetSlice = 256;
  // The work of forgetting this problem, in problems with short prompts.
  static std::size_t work_to_forget(const Problem& problem) { return 1 + problem.key.prompt.size() / kPromptSlice; }

  void publish(Problem& problem, std::shared_ptr<const Segments> segments) REQUIRES(engine_lock);
  // Keeps a response as the twin with this key, if there is enough memory.
  void add_twin(Problem& problem, Twins::Key key, std::int64_t epoch, std::shared_ptr<const Twin> twin,
                Arrival arrival = Arrival::kNew) REQUIRES(engine_lock);
  void end_twins(Problem& problem) REQUIRES(engine_lock);
  // Changes the live text of a problem; adds one if there is none.
  template <typename Change>
  auto change_live(Problem& problem, Change change) REQUIRES(engine_lock) {
    const MemoryLedger::Change booked(ledger, problem, Problem::kLive);
    if (!problem.live) problem.live = std::make_unique<LiveText>();
    return change(*problem.live);
  }
  void end_live(Problem& problem) REQUIRES(engine_lock);
  // Forgets the finished responses of a problem; returns how many. Erases the problem if it has no open session.
  std::size_t forget(Problem& problem) REQUIRES(engine_lock);

  // Frees forgotten text of a running group: some of it now, the rest by tidy_next().
  void tidy(const std::shared_ptr<Problem>& problem) REQUIRES(engine_lock);
  void tidy_next() REQUIRES(engine_lock);
  bool untidy() const REQUIRES(engine_lock) { return !untidy_.empty(); }

  // Notes that the problem has finished text that is not queued for a segment yet.
  void linger(Problem& problem) REQUIRES(engine_lock);
  void stop_lingering(Problem& problem) REQUIRES(engine_lock) { lingering_.erase(&problem); }
  // A problem noted by linger(); null if there is none.
  Problem* lingering() const REQUIRES(engine_lock) { return lingering_.empty() ? nullptr : *lingering_.begin(); }

 private:
  static constexpr std::size_t kPromptSlice = 2048;  // this many tokens of a prompt cost as much as a problem
  static constexpr std::size_t kTidyAtOnce = 1 << 11;

  bool tidy_some(Problem& problem, std::size_t work) REQUIRES(engine_lock);

  std::unordered_set<Problem*> lingering_ GUARDED_BY(engine_lock);
  std::deque<std::shared_ptr<Problem>> untidy_ GUARDED_BY(engine_lock);  // with forgotten text that is still linked
};

}  // namespace histospec
