#include "registry/ledger.h"

#include <numeric>

namespace histospec {

void MemoryLedger::book(const Problem& problem, Problem::Part part, const Holding& before, const Holding& after) {
  parts_[part] += after.bytes - before.bytes;
  if (part == Problem::kLive) {
    sessions_ += after.sessions - before.sessions;
    waiting_tokens_ += after.tokens - before.tokens;
    count_running();
  }
  problem.owner->held.change(before, after);
  problem.owner->tenant.bytes += after.bytes - before.bytes;
}

void MemoryLedger::enter(const Problem& problem) {
  for (const Problem::Part part : Problem::all_parts) book(problem, part, {}, problem.holding(part));
}

void MemoryLedger::leave(const Problem& problem) {
  for (const Problem::Part part : Problem::all_parts) book(problem, part, problem.holding(part), {});
}

void MemoryLedger::update(Namespace& namespace_) {
  if (namespace_.gone) return;
  const std::size_t bytes = namespace_.bytes();
  namespaces_ += bytes - namespace_.booked;
  namespace_.held.bytes += bytes - namespace_.booked;
  namespace_.tenant.bytes += bytes - namespace_.booked;
  namespace_.booked = bytes;
}

void MemoryLedger::leave(Namespace& namespace_) {
  namespaces_ -= namespace_.booked;
  namespace_.tenant.bytes -= namespace_.booked;
  namespace_.gone = true;
}

std::size_t MemoryLedger::memory_bytes() const {
  const std::size_t problems = std::accumulate(parts_.begin(), parts_.end(), std::size_t{0}) - parts_[Problem::kLive];
  return problems + merging_ + namespaces_ + running_bytes();
}

void MemoryLedger::change_noise(std::size_t before, std::size_t after) {
  noise_ += after - before;
  count_running();
}

void MemoryLedger::count_running() {
  // A position of a draft: its prediction, and the marks of both sources.
  constexpr std::size_t kPosition = sizeof(Prediction) + 4 * sizeof(RowGap) + 2 * sizeof(std::size_t);
  constexpr std::size_t kSession = sizeof(Session) + 8 * sizeof(RowGap) + 17 * kPosition + 256;
  running_.store(parts_[Problem::kLive] + sessions_ * kSession + noise_, std::memory_order_relaxed);
}

}  // namespace histospec
