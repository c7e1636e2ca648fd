#include "upkeep/evictor.h"

namespace histospec {
namespace {

// A namespace index keeps one kNamespacePart-th of the memory budget when the budget is short.
constexpr std::size_t kNamespacePart = 8;

// Work of one slice, in problems with short prompts.
constexpr std::size_t kSlice = Contents::kForgetSlice;

}  // namespace

// Returns true if the budget holds or nothing is left to evict.
bool Evictor::evict_some() {
  if (!over() || contents_.ledger.evictable_bytes() <= exhausted_at_) return true;
  exhausted_at_ = 0;
  std::size_t work = 0;
  const auto tired = [&work](std::size_t more) { return (work += more) >= kSlice; };
  // Namespace indexes first: text that problems share is a fallback, and must not evict their own history.
  for (const auto& [name, namespace_] : contents_.registry.namespaces()) {
    while (over() && namespace_->index.bytes() > budget_ / kNamespacePart && shrink(*namespace_)) {
      if (tired(kSlice / 4)) return !over();
    }
  }
  // Then twins, which are second copies of responses in the history.
  while (over() && !contents_.registry.with_twins().empty()) {
    contents_.end_twins(*contents_.registry.with_twins().front());
    if (tired(1)) return !over();
  }
  auto least_recent = contents_.registry.by_recency().begin();
  while (over() && least_recent != contents_.registry.by_recency().end()) {
    Problem& problem = **least_recent++;
    if (problem.live) continue;
    const std::size_t its_work = Contents::work_to_forget(problem);
    Namespace& namespace_ = *problem.owner;
    namespace_.counters.evicted_by_memory += contents_.forget(problem);
    has_evicted_ = true;
    if (namespace_.problems.empty()) {
      namespace_.forget();
      contents_.ledger.update(namespace_);
    }
    if (tired(its_work)) return !over();
  }
  // Only problems in use are left, and lose their oldest responses.
  for (Problem* problem : contents_.registry.by_recency()) {
    while (over() && !problem->segments->empty()) {
      const Segments& segments = *problem->segments;
      problem->owner->counters.evicted_by_memory += segments[0].extents().size();
      contents_.publish(*problem, segments.without_oldest());
      has_evicted_ = true;
      if (tired(1)) return !over();
    }
  }
  for (const auto& [name, namespace_] : contents_.registry.namespaces()) {
    while (over() && shrink(*namespace_)) {
      if (tired(kSlice / 4)) return !over();
    }
  }
  if (over()) exhausted_at_ = contents_.ledger.evictable_bytes();
  return true;
}

bool Evictor::shrink(Namespace& namespace_) {
  const bool shrunk = namespace_.index.shrink();
  contents_.ledger.update(namespace_);
  return shrunk;
}

void Evictor::make_room(Monitor::Lock& lock) {
  bool done;
  do {
    done = evict_some();
    contents_.monitor.destroy_discarded(
        lock);  // in this thread, so that a caller who fills memory waits until there is some
    if (!done) Monitor::breathe(lock);
  } while (!done);
}

void Evictor::relieve() {
  if (behind_ || evict_some()) return;
  behind_ = true;
  contents_.monitor.to_tidy.notify_one();
}

void Evictor::catch_up() {
  if (behind_) behind_ = !evict_some();
}

Housekeeper::Housekeeper(Contents& contents, Evictor& evictor)
    : contents_(contents), evictor_(evictor), thread_([this] { run(); }) {}

Housekeeper::~Housekeeper() {
  {
    const Monitor::Lock lock(contents_.monitor);
    stopping_ = true;
  }
  contents_.monitor.to_tidy.notify_all();
  thread_.join();
}

void Housekeeper::run() {
  Monitor::Lock lock(contents_.monitor);
  while (true) {
    contents_.monitor.to_tidy.wait(
        lock, [this]() REQUIRES(engine_lock) { return stopping_ || !idle() || contents_.monitor.discarded_much(); });
    if (stopping_) return;
    contents_.monitor.destroy_discarded(lock);
    evictor_.catch_up();
    contents_.tidy_next();
    if (idle()) contents_.monitor.idle.notify_all();
    Monitor::breathe(lock);
  }
}

}  // namespace histospec
