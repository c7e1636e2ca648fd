// Building and merging of segments, with the lock released.
#pragma once

#include <deque>
#include <memory>
#include <span>
#include <thread>

#include "histospec/options.h"
#include "upkeep/evictor.h"

namespace histospec {

// The merger: adds responses to the history of a problem and to the index of its namespace. It builds and merges
// segments with the lock released.
class Merger {
 public:
  Merger(const EngineOptions& options, Contents& contents, Evictor& evictor);

  // Adds responses after the history of a problem; stored ones, before it. Returns false, and adds nothing, if the
  // history was forgotten meanwhile.
  bool add(Monitor::Lock& lock, Problem& problem, std::span<const ResponseView> fresh, bool stored = false)
      REQUIRES(engine_lock);
  // Adds new responses of a problem to the index of its namespace: all while it is small, then one of each group.
  void show(Monitor::Lock& lock, const std::shared_ptr<Namespace>& namespace_, Problem& problem,
            std::span<const ResponseView> responses) REQUIRES(engine_lock);
  // Adds the newest response of each epoch among these stored responses of a problem (oldest first) to the index of its
  // namespace, without evicting anything: the newest epoch may fill the index, the others half of it.
  void show_stored(Monitor::Lock& lock, const std::shared_ptr<Namespace>& namespace_,
                   std::span<const ResponseView> responses) REQUIRES(engine_lock);

 private:
  // Keeps a copy for the index of the namespace. After the last one, index_shared() counts their memory, and indexes
  // them if there are enough.
  void share(Namespace& namespace_, const ResponseView& response) REQUIRES(engine_lock);
  void index_shared(Monitor::Lock& lock, const std::shared_ptr<Namespace>& namespace_) REQUIRES(engine_lock);

  const Window window_;
  const std::size_t largest_segment_;
  Contents& contents_;
  Evictor& evictor_;
};

// The builder: a thread that builds segments from finished responses.
class Builder {
 public:
  Builder(std::size_t budget, Contents& contents, Evictor& evictor, Merger& merger);
  ~Builder();
  Builder(const Builder&) = delete;
  Builder& operator=(const Builder&) = delete;

  // Call this after a session of the problem has ended. Queues the problem if its finished responses are to become a
  // segment now.
  void schedule(const std::shared_ptr<Problem>& problem) REQUIRES(engine_lock);
  // Whether responses finish faster than they become segments.
  bool behind() const REQUIRES(engine_lock) { return contents_.ledger.waiting_tokens() > most_waiting_; }
  bool idle() const REQUIRES(engine_lock) { return queue_.empty() && building_ == 0; }

 private:
  void ask_for_segment(const std::shared_ptr<Problem>& problem) REQUIRES(engine_lock);
  void press() REQUIRES(engine_lock);
  void run();
  void build(Monitor::Lock& lock, Problem& problem) REQUIRES(engine_lock);

  const std::size_t most_waiting_;  // how many tokens may wait for their segment
  Contents& contents_;
  Evictor& evictor_;
  Merger& merger_;
  std::deque<std::shared_ptr<Problem>> queue_ GUARDED_BY(engine_lock);
  std::size_t building_ GUARDED_BY(engine_lock) = 0;
  bool stopping_ GUARDED_BY(engine_lock) = false;
  std::thread thread_;  // last, because it uses all members above
};

}  // namespace histospec
