#include "upkeep/merger.h"

#include <algorithm>

namespace histospec {
namespace {

// Memory that merging takes per token, for copies, ranks, the suffix sort and the new rows. Room is made for it before.
constexpr std::size_t kMergingBytes = 48;

// The most tokens of a merged segment, so that merging takes at most one kMergingPart-th of the budget; at least
// kLargestSegment.
constexpr std::size_t kLargestSegment = 1 << 18;
constexpr std::size_t kMergingPart = 32;

}  // namespace

Merger::Merger(const EngineOptions& options, MemoryLedger& ledger, Contents& contents, Evictor& evictor)
    : window_{options.history_epochs, options.history_responses},
      largest_segment_(std::max(kLargestSegment, options.memory_bytes / kMergingPart / kMergingBytes)),
      ledger_(ledger),
      contents_(contents),
      evictor_(evictor) {}

bool Merger::add_segment(Monitor::Lock& lock, Problem& problem, const std::shared_ptr<const Segment>& fresh,
                         bool stored) {
  const std::uint64_t generation = problem.generation;
  while (problem.generation == generation) {
    const std::shared_ptr<const Segments> before = problem.segments;
    if (before->empty()) {  // nothing to merge with
      contents_.publish(problem, std::make_shared<const Segments>(1, fresh));
      return true;
    }
    LeftOut evicted;
    std::shared_ptr<const Segments> after;
    {
      const Monitor::Unlocked others(lock);
      after = stored ? with_stored(*before, fresh, window_, evicted)
                     : with_segment(*before, fresh, window_, evicted, {.largest = largest_segment_});
    }
    // Another thread may have added a segment meanwhile; then merge again, with that one.
    if (problem.generation == generation && problem.segments == before) {
      contents_.publish(problem, std::move(after));
      problem.owner->counters.evicted_by_epochs += evicted.epochs;
      problem.owner->counters.evicted_by_responses += evicted.responses;
      return true;
    }
  }
  return false;
}

void Merger::show_stored(Monitor::Lock& lock, const std::shared_ptr<Namespace>& namespace_,
                         std::span<const ResponseView> responses) {
  const std::int64_t newest = responses.back().epoch;
  for (std::size_t i = responses.size(); i-- > 0;) {
    const ResponseView& response = responses[i];
    if (i + 1 < responses.size() && response.epoch == responses[i + 1].epoch) continue;
    if (namespace_->index.has_room(response.tokens.size(), response.epoch == newest ? 1 : 2)) {
      show(lock, namespace_, response);
    }
  }
}

void Merger::show(Monitor::Lock& lock, const std::shared_ptr<Namespace>& namespace_, const ResponseView& response) {
  NamespaceIndex& index = namespace_->index;
  try {
    const bool enough = index.add(response);
    ledger_.update(*namespace_);
    if (!enough || namespace_->merging) return;
    const NamespaceIndex::Batch batch = index.take();
    ledger_.update(*namespace_);
    const MemoryLedger::Merge merge(ledger_, *namespace_, kMergingBytes * batch.tokens());
    evictor_.make_room(lock);
    std::shared_ptr<const Segments> merged;
    {
      const Monitor::Unlocked others(lock);
      merged = index.merge(batch);
    }
    index.publish(batch, std::move(merged));
  } catch (const std::exception&) {
    // Out of memory. The history has the response, so the namespace index can do without it.
  }
  ledger_.update(*namespace_);
}

}  // namespace histospec
