// The builder: a thread that builds segments from finished responses, with the lock released.
#pragma once

#include <deque>
#include <memory>
#include <thread>

#include "upkeep/merger.h"

namespace histospec {

class Builder {
 public:
  Builder(std::size_t budget, Monitor& monitor, MemoryLedger& ledger, Registry& registry, Contents& contents,
          Evictor& evictor, Merger& merger);
  ~Builder();
  Builder(const Builder&) = delete;
  Builder& operator=(const Builder&) = delete;

  // Call this after a session of the problem has ended. Queues the problem if its finished responses are to become a
  // segment now.
  void schedule(const std::shared_ptr<Problem>& problem) REQUIRES(engine_lock);
  // Whether responses finish faster than they become segments.
  bool behind() const REQUIRES(engine_lock) { return ledger_.waiting_tokens() > most_waiting_; }
  bool idle() const REQUIRES(engine_lock) { return queue_.empty() && building_ == 0; }

 private:
  void ask_for_segment(const std::shared_ptr<Problem>& problem) REQUIRES(engine_lock);
  void press() REQUIRES(engine_lock);
  void run();
  void build(Monitor::Lock& lock, Problem& problem) REQUIRES(engine_lock);

  const std::size_t most_waiting_;  // how many tokens may wait for their segment
  Monitor& monitor_;
  MemoryLedger& ledger_;
  Registry& registry_;
  Contents& contents_;
  Evictor& evictor_;
  Merger& merger_;
  std::deque<std::shared_ptr<Problem>> queue_ GUARDED_BY(engine_lock);
  std::size_t building_ GUARDED_BY(engine_lock) = 0;
  bool stopping_ GUARDED_BY(engine_lock) = false;
  std::thread thread_;  // last, because it uses all members above
};

}  // namespace histospec
