#include "registry/namespace.h"

#include <algorithm>

namespace histospec {

void Prompts::add(Problem& problem) {
  if (problem.key.prompt.empty()) return;
  const auto length = lengths_.try_emplace(problem.key.prompt.size(), 0).first;
  by_hash_.emplace(problem.key.hash, &problem);
  ++length->second;
}

void Prompts::remove(const Problem& problem) {
  if (problem.key.prompt.empty()) return;
  const auto [first, last] = by_hash_.equal_range(problem.key.hash);
  for (auto found = first; found != last; ++found) {
    if (found->second != &problem) continue;
    by_hash_.erase(found);
    const auto length = lengths_.find(problem.key.prompt.size());
    if (--length->second == 0) lengths_.erase(length);
    return;
  }
}

std::size_t Namespace::bytes() const {
  return sizeof(Namespace) + estimator.bytes() + index.bytes() + latest_lengths.capacity() * sizeof(std::int64_t);
}

void Namespace::saw_response(std::size_t tokens, std::int64_t epoch, bool stored) {
  const bool full = latest_lengths.size() == kLatestLengths;
  if (full && !stored) latest_lengths.erase(latest_lengths.begin());
  if (!full || !stored) latest_lengths.push_back(static_cast<std::int64_t>(tokens));  // never allocates
  emptied = false;
  counters.newest_epoch = std::max(counters.newest_epoch, epoch);
}

void Namespace::forget() {
  index.clear();
  estimator.reset();
  trust = TwinTrust();
  latest_lengths.clear();
}

}  // namespace histospec
