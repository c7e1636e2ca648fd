// The merger: adds segments to the history of a problem and to the index of its namespace. It merges with the lock
// released.
#pragma once

#include <memory>

#include "upkeep/evictor.h"

namespace histospec {

class Merger {
 public:
  Merger(const EngineOptions& options, MemoryLedger& ledger, Contents& contents, Evictor& evictor);

  // Adds a segment after the history of a problem; a segment of stored responses, before it. Returns false, and adds
  // nothing, if the history was forgotten meanwhile.
  bool add_segment(Monitor::Lock& lock, Problem& problem, const std::shared_ptr<const Segment>& fresh,
                   bool stored = false) REQUIRES(engine_lock);
  // Adds a response to the index of its namespace.
  void show(Monitor::Lock& lock, const std::shared_ptr<Namespace>& namespace_, const ResponseView& response)
      REQUIRES(engine_lock);
  // Adds the newest response of each epoch among these stored responses of a problem (oldest first) to the index of its
  // namespace, without evicting anything: the newest epoch may fill the index, the others half of it.
  void show_stored(Monitor::Lock& lock, const std::shared_ptr<Namespace>& namespace_,
                   std::span<const ResponseView> responses) REQUIRES(engine_lock);

 private:
  const Window window_;
  const std::size_t largest_segment_;
  MemoryLedger& ledger_;
  Contents& contents_;
  Evictor& evictor_;
};

}  // namespace histospec
