#include "registry/prompts.h"

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

}  // namespace histospec
