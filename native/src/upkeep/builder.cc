#include "upkeep/builder.h"

#include <algorithm>
#include <new>

namespace histospec {
namespace {

// Memory that merging takes per token, for copies, ranks, the suffix sort and the new rows. Room is made for it before.
constexpr std::size_t kMergingBytes = 48;

// The most tokens of a merged segment, so that merging takes at most one kMergingPart-th of the budget; at least
// kLargestSegment.
constexpr std::size_t kLargestSegment = 1 << 18;
constexpr std::size_t kMergingPart = 32;

// Finished responses wait for the end of their group, because one segment for all of them is cheaper to build and to
// follow than one each. They wait at most until they have this many tokens.
constexpr std::size_t kWaitingTokens = 1 << 16;

// At most this many tokens are copied for a segment at a time, so that the copy does not hold the lock for long.
constexpr std::size_t kBuildTokens = 1 << 18;

// Responses may wait for their segment until they fill one kWaitingPart-th of the budget, at kWaitingBytes per token of
// live text; always at least kFewTokens, the size of a few responses.
constexpr std::size_t kWaitingPart = 4;
constexpr std::size_t kWaitingBytes = 44;
constexpr std::size_t kFewTokens = 1 << 15;

}  // namespace

Merger::Merger(const EngineOptions& options, Contents& contents, Evictor& evictor)
    : window_{options.history_epochs, options.history_responses},
      largest_segment_(std::max(kLargestSegment, options.memory_bytes / kMergingPart / kMergingBytes)),
      contents_(contents),
      evictor_(evictor) {}

bool Merger::add(Monitor::Lock& lock, Problem& problem, std::span<const ResponseView> fresh, bool stored) {
  const std::uint64_t generation = problem.generation;
  while (problem.generation == generation) {
    const std::shared_ptr<const Segments> before = problem.segments;
    LeftOut evicted;
    std::shared_ptr<const Segments> after;
    {
      const Monitor::Unlocked others(lock);
      after = stored ? with_stored(*before, Segment::build(fresh), window_, evicted)
                     : with_responses(*before, fresh, window_, evicted, {.largest = largest_segment_});
    }
    // Another thread may have added responses meanwhile; then merge again, with those.
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
      share(*namespace_, response);
    }
  }
  index_shared(lock, namespace_);
}

void Merger::show(Monitor::Lock& lock, const std::shared_ptr<Namespace>& namespace_, Problem& problem,
                  std::span<const ResponseView> responses) {
  bool chosen = problem.shares(responses.front().epoch, responses.size());
  for (const ResponseView& response : responses) {
    if (chosen || namespace_->index.small()) share(*namespace_, response);
    chosen = false;
  }
  index_shared(lock, namespace_);
}

void Merger::share(Namespace& namespace_, const ResponseView& response) {
  try {
    namespace_.index.add(response);
  } catch (const std::exception&) {
    // Out of memory. The history has the response, so the namespace index can do without it.
    ++namespace_.counters.index_failures;
  }
}

void Merger::index_shared(Monitor::Lock& lock, const std::shared_ptr<Namespace>& namespace_) {
  NamespaceIndex& index = namespace_->index;
  contents_.ledger.update(*namespace_);
  if (!index.ready() || namespace_->merging) return;
  try {
    const NamespaceIndex::Batch batch = index.take();
    contents_.ledger.update(*namespace_);
    const MemoryLedger::Merge merge(contents_.ledger, *namespace_, kMergingBytes * batch.tokens());
    evictor_.make_room(lock);
    std::shared_ptr<const Segments> merged;
    {
      const Monitor::Unlocked others(lock);
      merged = index.merge(batch);
    }
    index.publish(batch, std::move(merged));
  } catch (const std::exception&) {
    ++namespace_->counters.index_failures;  // as above
  }
  contents_.ledger.update(*namespace_);
}

Builder::Builder(std::size_t budget, Contents& contents, Evictor& evictor, Merger& merger)
    : most_waiting_(std::max(kFewTokens, budget / kWaitingPart / kWaitingBytes)),
      contents_(contents),
      evictor_(evictor),
      merger_(merger),
      thread_([this] { run(); }) {}

Builder::~Builder() {
  {
    const Monitor::Lock lock(contents_.monitor);
    stopping_ = true;
  }
  contents_.monitor.to_build.notify_all();
  thread_.join();
}

void Builder::schedule(const std::shared_ptr<Problem>& problem) {
  if (!problem->live) return;
  const bool over = problem->live->running() == 0;
  if (over && problem->live->finished_tokens() == 0) {  // even if the builder still builds a forgotten response
    contents_.end_live(*problem);
    Namespace& namespace_ = *problem->owner;
    if (namespace_.emptied) {
      contents_.forget(*problem);
      contents_.registry.erase_if_empty(namespace_);
    }
    return;
  }
  if (!problem->building) {
    if (over || problem->live->finished_tokens() >= kWaitingTokens) {
      ask_for_segment(problem);
    } else if (problem->live->finished_tokens() > 0) {
      contents_.linger(*problem);
      press();
    }
  }
  if (!over) contents_.tidy(problem);
}

void Builder::ask_for_segment(const std::shared_ptr<Problem>& problem) {
  try {
    queue_.push_back(problem);
  } catch (const std::bad_alloc&) {  // the next session of the problem that ends asks again
    return;
  }
  problem->building = true;
  contents_.stop_lingering(*problem);
  contents_.monitor.to_build.notify_one();
}

// Builds segments before the end of their groups if too many tokens wait.
void Builder::press() {
  if (2 * contents_.ledger.waiting_tokens() <= most_waiting_ || !queue_.empty()) return;
  while (Problem* problem = contents_.lingering()) {
    contents_.stop_lingering(*problem);
    ask_for_segment(problem->shared_from_this());
  }
}

void Builder::run() {
  Monitor::Lock lock(contents_.monitor);
  while (true) {
    contents_.monitor.to_build.wait(lock, [this]() REQUIRES(engine_lock) { return stopping_ || !queue_.empty(); });
    if (stopping_) return;
    const std::shared_ptr<Problem> problem = std::move(queue_.front());
    queue_.pop_front();
    ++building_;
    // Without live text the problem was forgotten, and maybe its namespace with it.
    const auto owner = problem->live ? contents_.registry.find_namespace(problem->owner->name) : nullptr;
    try {
      build(lock, *problem);
      problem->building = false;
      schedule(problem);  // queues what finished meanwhile; if nothing did, ends the live text
      evictor_.make_room(lock);
      press();
    } catch (const std::exception&) {
      // Out of memory, or too long for a segment. The finished responses stay live text until the next session of the
      // problem ends.
      problem->building = false;
      if (owner) ++owner->counters.index_failures;
    }
    --building_;
    contents_.monitor.idle.notify_all();
  }
}

void Builder::build(Monitor::Lock& lock, Problem& problem) {
  if (!problem.live) return;
  const std::vector<LiveText::TextId> texts = problem.live->finished_texts(kBuildTokens);
  if (texts.empty()) return;  // forgotten meanwhile
  // A copy, because the texts may move while the lock is released.
  std::vector<Response> responses;
  for (const ResponseView& r : problem.live->finished(kBuildTokens)) responses.push_back(owned(r));
  std::vector<ResponseView> views;
  for (const Response& r : responses) views.push_back(r.view());
  if (!merger_.add(lock, problem, views)) return;
  contents_.change_live(problem, [&](LiveText& live) { live.dissolve(texts); });
  const auto namespace_ = contents_.registry.find_namespace(problem.owner->name);
  if (namespace_) merger_.show(lock, namespace_, problem, views);
}

}  // namespace histospec
