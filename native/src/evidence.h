// What the sources know about the next token: a few candidates and, for each source and context length, how often the
// context was seen and what followed it.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "histospec/types.h"

namespace histospec {

// The context lengths that count as separate predictions. Long contexts are rare and sure, short ones common and vague;
// the estimator learns how much each is worth.
inline constexpr std::array<int, 10> kOrders = {1, 2, 3, 4, 5, 6, 8, 10, 12, 16};
inline constexpr int kOrderCount = static_cast<int>(kOrders.size());

enum Source : int { kHistory, kOwn, kSiblings, kNamespace, kSourceCount };

inline constexpr int kMaxCandidates = 4;

// The tokens worth estimating at one position, best first by votes.
class Candidates {
 public:
  void vote(Token token, float votes) {
    for (int i = 0; i < size_; ++i) {
      if (tokens_[i] == token) {
        votes_[i] += votes;
        return;
      }
    }
    if (size_ < kCapacity) {
      tokens_[size_] = token;
      votes_[size_++] = votes;
    }
  }

  // Orders the candidates by votes (ties: the one named first) and keeps the best kMaxCandidates.
  void elect() {
    const int keep = std::min(size_, kMaxCandidates);
    for (int i = 0; i < keep; ++i) {
      int best = i;
      for (int j = i + 1; j < size_; ++j) {
        if (votes_[j] > votes_[best]) best = j;
      }
      std::rotate(tokens_.begin() + i, tokens_.begin() + best, tokens_.begin() + best + 1);
      std::rotate(votes_.begin() + i, votes_.begin() + best, votes_.begin() + best + 1);
    }
    size_ = keep;
  }

  // Forgets the last ones that have less than `share` of the votes of the first: they are almost never right, and each
  // costs as much to estimate.
  void drop_unlikely(float share) {
    while (size_ > 1 && votes_[size_ - 1] < share * votes_[0]) --size_;
  }

  int size() const { return size_; }
  Token operator[](int i) const { return tokens_[i]; }

 private:
  static constexpr int kCapacity = 16;
  int size_ = 0;
  std::array<Token, kCapacity> tokens_;
  std::array<float, kCapacity> votes_;
};

// Occurrences of the contexts of each length, and of each candidate after them.
struct Counts {
  std::array<std::uint32_t, kOrderCount> total{};
  std::array<std::array<std::uint32_t, kMaxCandidates>, kOrderCount> of{};

  // How many of kOrders matched at all; they are the first so many.
  int matched() const {
    int n = 0;
    while (n < kOrderCount && total[n] > 0) ++n;
    return n;
  }
};

struct Evidence {
  Candidates candidates;
  std::array<Counts, kSourceCount> counts;
  // The same for what stands near the same offset in old responses.
  std::uint32_t aligned_total = 0;
  std::array<std::uint32_t, kMaxCandidates> aligned{};
};

}  // namespace histospec
