#include "registry/namespace.h"

#include <algorithm>

namespace histospec {

void Prompts::add(Problem& problem) {
  if (!problem.key.id.empty()) {
    const Problem*& named = named_.try_emplace(problem.key.prompt_hash, &problem).first->second;
    if (!named->known()) named = &problem;
    return;
  }
  const auto length = lengths_.try_emplace(problem.key.prompt.size(), 0).first;
  by_hash_.emplace(problem.key.hash, &problem);
  ++length->second;
}

void Prompts::remove(const Problem& problem) {
  if (!problem.key.id.empty()) {
    const auto named = named_.find(problem.key.prompt_hash);
    if (named != named_.end() && named->second == &problem) named_.erase(named);
    return;
  }
  const auto [first, last] = by_hash_.equal_range(problem.key.hash);
  for (auto found = first; found != last; ++found) {
    if (found->second != &problem) continue;
    by_hash_.erase(found);
    const auto length = lengths_.find(problem.key.prompt.size());
    if (--length->second == 0) lengths_.erase(length);
    return;
  }
}

bool Prompts::known_elsewhere(const Problem& problem) const {
  const auto known = [&problem](const auto& entry)
                         REQUIRES(engine_lock) { return entry.second != &problem && entry.second->known(); };
  const std::uint64_t hash = problem.key.prompt_hash;
  const auto named = named_.find(hash);
  if (named != named_.end() && known(*named)) return true;
  const auto [first, last] = by_hash_.equal_range(hash);
  return std::any_of(first, last, known);
}

Problem* Prompts::continued_by(Tokens prompt, Monitor::Lock& lock) const {
  struct Prefix {
    std::size_t length;
    std::uint64_t hash;
  };
  std::vector<Prefix> known;  // a ring of the longest ones
  std::size_t found = 0, work = 0, hashed = 0;
  std::uint64_t hash = hash_key.start;
  // Each slice looks its position up again, because prompts may have come and gone.
  for (auto next = lengths_.begin(); next != lengths_.end() && next->first < prompt.size();) {
    const std::size_t end = std::min(next->first, hashed + kSlice);
    work += end - hashed + kLookupWork;
    while (hashed < end) hash = hash_key.next(hash, static_cast<std::uint32_t>(prompt[hashed++]));
    if (hashed == next->first && by_hash_.contains(hash)) {
      if (known.size() < kExamined) known.emplace_back();
      known[found++ % kExamined] = {hashed, hash};
    }
    if (work < kSlice) {
      if (hashed == next->first) ++next;
      continue;
    }
    work = 0;
    const std::size_t done = hashed == next->first ? hashed + 1 : hashed;
    Monitor::breathe(lock);
    next = lengths_.lower_bound(done);
  }
  for (std::size_t i = 0; i < known.size(); ++i) {
    const auto [length, its_hash] = known[--found % kExamined];
    const auto [first, last] = by_hash_.equal_range(its_hash);
    for (auto same = first; same != last; ++same) {
      Problem& problem = *same->second;
      if (problem.continued_by(prompt) && std::ranges::equal(problem.key.prompt, prompt.first(length))) {
        return &problem;
      }
    }
    work += kExaminedWork;
    if (work < kSlice) continue;
    work = 0;
    Monitor::breathe(lock);
  }
  return nullptr;
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
