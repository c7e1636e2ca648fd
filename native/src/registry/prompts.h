// The prompts of a namespace, to find the problem that a later turn belongs to: its prompt is an earlier one, what was
// answered, and what the environment said to that.
//
// Every prompt is kept as a hash of all its tokens; hashes of all prefixes of a prompt come out of one pass over it,
// and only those as long as some known prompt are looked up. A hash only narrows the search: the tokens decide.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>

#include "registry/problem.h"

namespace histospec {

class Prompts {
 public:
  // Problems that their prompt names; others do not matter here.
  void add(Problem& problem);
  void remove(const Problem& problem);

  // The problem with the longest prompt that `prompt` begins with, is longer than, and continues as `fits` wants; null
  // if there is none.
  template <typename Fits>
  Problem* longest_prefix(Tokens prompt, Fits fits) const REQUIRES(engine_lock) {
    Problem* best = nullptr;
    std::uint64_t hash = ProblemKey::start();
    std::size_t i = 0;
    for (const auto& [length, uses] : lengths_) {
      if (length >= prompt.size()) break;
      while (i < length) hash = ProblemKey::next(hash, prompt[i++]);
      const auto [first, last] = by_hash_.equal_range(hash);
      for (auto found = first; found != last; ++found) {
        if (std::ranges::equal(found->second->key.prompt, prompt.first(length)) && fits(*found->second)) {
          best = found->second;
        }
      }
    }
    return best;
  }

 private:
  std::multimap<std::uint64_t, Problem*> by_hash_;
  std::map<std::size_t, std::size_t> lengths_;  // of prompts -> how many are as long
};

}  // namespace histospec
