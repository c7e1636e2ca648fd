#include "upkeep/evictor.h"

#include <algorithm>

namespace histospec {
namespace {

// A namespace index keeps one kNamespacePart-th of the memory budget when the budget is short.
constexpr std::size_t kNamespacePart = 8;

// Work of one slice, in problems with short prompts.
constexpr std::size_t kSlice = Contents::kForgetSlice;
// Problems that are moved to another shelf for the work of forgetting one.
constexpr std::size_t kMoved = 32;

}  // namespace

bool Evictor::over() const {
  if (short_of_memory()) return true;
  for (const auto& [name, tenant] : contents_.registry.tenants()) {
    if (tenant.bytes > tenant.most) return true;
  }
  return false;
}

std::size_t Evictor::excess(const Tenant& tenant, bool last) const {
  std::size_t keeps = tenant.most;
  if (short_of_memory()) {
    std::size_t holders = 0;
    for (const auto& [name, each] : contents_.registry.tenants()) holders += each.bytes > 0;
    keeps = last ? 0 : std::min(keeps, budget_ / std::max(holders, std::size_t{1}));
  }
  return tenant.bytes > keeps ? tenant.bytes - keeps : 0;
}

Tenant* Evictor::furthest(bool last) {
  Tenant* found = nullptr;
  std::size_t largest = 0;
  for (auto& [name, tenant] : contents_.registry.tenants()) {
    const std::size_t its_excess = tenant.visited ? 0 : excess(tenant, last);
    if (its_excess <= largest) continue;
    largest = its_excess;
    found = &tenant;
  }
  return found;
}

// Returns true if nothing is over, or nothing is left to evict.
bool Evictor::evict_some() {
  if (!over() || contents_.ledger.evictable_bytes() <= exhausted_at_) return true;
  exhausted_at_ = 0;
  std::size_t work = 0;
  for (const bool last : {false, true}) {
    for (auto& [name, tenant] : contents_.registry.tenants()) tenant.visited = false;
    while (Tenant* tenant = furthest(last)) {
      if (!evict_from(*tenant, last, work)) return !over();
      tenant->visited = true;
    }
  }
  if (over()) exhausted_at_ = contents_.ledger.evictable_bytes();
  return true;
}

bool Evictor::evict_from(Tenant& tenant, bool last, std::size_t& work) {
  const auto tired = [&work](std::size_t more) { return (work += more) >= kSlice; };
  // Namespace indexes first: text that problems share is a fallback, and must not evict their own history.
  for (const auto& [name, namespace_] : contents_.registry.namespaces()) {
    if (&namespace_->tenant != &tenant) continue;
    while (excess(tenant, last) > 0 && namespace_->index.bytes() > budget_ / kNamespacePart && shrink(*namespace_)) {
      if (tired(kSlice / 4)) return false;
    }
  }
  // Then twins, which are second copies of responses in the history.
  while (excess(tenant, last) > 0 && !tenant.twinned.empty()) {
    contents_.end_twins(*tenant.twinned.front());
    if (tired(1)) return false;
  }
  std::size_t moved = 0;
  const auto move = [&](Problem& problem, Tenant::Shelf shelf) REQUIRES(engine_lock) {
    contents_.registry.shelve(problem, shelf);
    return ++moved % kMoved == 0 && tired(1);
  };
  std::list<Problem*>& recent = tenant.shelves[Tenant::kRecent];
  while (excess(tenant, last) > 0 && !recent.empty()) {
    Problem& problem = *recent.front();
    if (problem.live) {
      if (move(problem, Tenant::kBusy)) return false;
      continue;
    }
    const std::size_t its_work = Contents::work_to_forget(problem);
    Namespace& namespace_ = *problem.owner;
    namespace_.counters.evicted_by_memory += contents_.forget(problem);
    has_evicted_ = true;
    if (namespace_.problems.empty()) {
      namespace_.forget();
      contents_.ledger.update(namespace_);
    }
    if (tired(its_work)) return false;
  }
  // Only problems in use are left, and lose their oldest responses.
  std::list<Problem*>& busy = tenant.shelves[Tenant::kBusy];
  while (excess(tenant, last) > 0 && !busy.empty()) {
    Problem& problem = *busy.front();
    const Segments& segments = *problem.segments;
    if (segments.empty()) {
      if (move(problem, Tenant::kBare)) return false;
      continue;
    }
    problem.owner->counters.evicted_by_memory += segments[0].extents().size();
    contents_.publish(problem, segments.without_oldest());
    has_evicted_ = true;
    if (tired(1)) return false;
  }
  for (const auto& [name, namespace_] : contents_.registry.namespaces()) {
    if (&namespace_->tenant != &tenant) continue;
    while (excess(tenant, last) > 0 && shrink(*namespace_)) {
      if (tired(kSlice / 4)) return false;
    }
  }
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
