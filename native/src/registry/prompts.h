// The prompts of a namespace, to find the problem that a later turn belongs to. The prompt of a later turn consists of
// an earlier prompt, the response to it, and the environment's answer.
//
// Every prompt is kept as a hash of all its tokens. One pass over a prompt yields the hashes of all its prefixes, and
// those with the length of a known prompt are looked up. A hash only narrows the search; then the tokens are compared.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>

#include "registry/problem.h"

namespace histospec {

class Prompts {
 public:
  // Problems with an explicit id are ignored.
  void add(Problem& problem);
  void remove(const Problem& problem);

  // The problem with the longest prompt that is a proper prefix of `prompt` and for which fits(problem) is true; null
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
  std::map<std::size_t, std::size_t> lengths_;  // length of a prompt -> how many prompts have it
};

}  // namespace histospec
