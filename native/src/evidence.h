// Evidence on the next token: what stands at the places where the end of the context stands, too.
//
// Each such place is a witness for the token that followed there. Witnesses vote, the more the more of the context they
// share, and the less the more like them were heard before; what is kept is a tally for each token.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "histospec/types.h"

namespace histospec {

// Where a witness stands: in the problem's finished responses, in the session's own text or prompt, in that of its
// siblings, or in other problems of the namespace. Besides witnesses there is the twin.
enum Source : std::uint8_t { kHistory, kOwn, kSiblings, kNamespace, kSourceCount, kTwin = kSourceCount };

inline constexpr int kMaxCandidates = 4;

// Responses that are so many epochs old, or more, are counted together.
inline constexpr int kOldest = 4;

// How long the shared context is, in classes: beyond a few tokens it is the order of magnitude that counts.
inline constexpr std::array<int, 10> kOrders = {1, 2, 3, 4, 6, 8, 11, 16, 22, 32};
inline constexpr int kLevels = static_cast<int>(kOrders.size()) + 1;  // 0: nothing
inline constexpr std::array<std::uint8_t, kMaxOrder + 1> kLevelOf = [] {
  std::array<std::uint8_t, kMaxOrder + 1> t{};
  for (int shared = 0; shared <= kMaxOrder; ++shared) {
    for (int order : kOrders) t[shared] = static_cast<std::uint8_t>(t[shared] + (order <= shared));
  }
  return t;
}();

// What was said for one token.
struct Tally {
  Token token;
  std::uint8_t level;   // of the witness that shares the most
  std::uint8_t shared;  // tokens that the best witness shares
  Source source;        // where it stands
  std::uint8_t age;     // in history: of its response, in epochs, at most kOldest
  float at_level;       // witnesses at the level
  float count;          // witnesses
  float aligned;        // votes of the history, less the further they stand from the session's own offset
  std::array<float, kSourceCount> votes;

  static Tally of(Token token) { return {token, 0, 0, kHistory, 0, 0, 0, 0, {}}; }
  float all() const { return votes[0] + votes[1] + votes[2] + votes[3]; }
};

class Evidence {
 public:
  using Name = std::uint8_t;
  // Of what followed where a response ended, or where the text was not generated; and of a token too many.
  static constexpr Name kNoToken = 15;

  Evidence() { tallies_[kNoToken] = Tally::of(-1); }  // the others begin when they are named

  // What witnesses of this token call it.
  Name name(Token token) {
    int i = 0;
    while (i < named_ && tallies_[i].token != token) ++i;
    if (i == named_ && named_ < kNoToken) tallies_[named_++] = Tally::of(token);
    return static_cast<Name>(i);
  }

  // Witnesses of one source that speak for one token, the best of them first.
  struct Voices {
    Name name;
    Source source;
    std::uint8_t shared;    // tokens of the context that stand before the first, the best: 1 ... kMaxOrder
    std::uint8_t count;     // how many they are
    std::uint8_t at_level;  // of them, at the level of the first
    float votes;
    float aligned;
    std::uint8_t age = 0;  // of the response of the first
  };
  void add(const Voices& voices) {
    Tally& tally = tallies_[voices.name];
    tally.votes[voices.source] += voices.votes;
    tally.aligned += voices.aligned;
    tally.count += voices.count;
    const std::uint8_t level = kLevelOf[voices.shared];
    if (level > tally.level) tally.level = level, tally.at_level = 0;
    if (level == tally.level) tally.at_level += voices.at_level;
    if (voices.shared > tally.shared) {
      tally.shared = voices.shared;
      tally.source = voices.source;
      tally.age = voices.age;
    }
    matched_[voices.source] = std::max(matched_[voices.source], level);
  }

  // The vote of the witness that comes after `nearness` others of its kind.
  static float vote(int shared, int nearness) { return static_cast<float>(shared) * kInverse[nearness]; }
  // How much of a vote counts as aligned, so many tokens from the session's offset.
  static float alignment(std::int64_t distance) {
    constexpr float kReach = 16;
    return kReach / (kReach + static_cast<float>(std::abs(distance)));
  }

  // Of the tokens named, keeps the best by votes: at most kMaxCandidates, and those with less than `share` of the votes
  // of the first are almost never right. Ties: the one named first.
  void elect(float share) {
    std::array<float, kNoToken> votes;
    for (int i = 0; i < named_; ++i) votes[i] = tallies_[i].all();
    float least = 0;
    for (elected_ = 0; elected_ < std::min(named_, kMaxCandidates); ++elected_) {
      const auto best = static_cast<Name>(std::max_element(votes.begin(), votes.begin() + named_) - votes.begin());
      if (votes[best] < least) break;
      if (elected_ == 0) least = share * votes[best];
      votes[best] = -1;
      candidates_[elected_] = best;
    }
  }

  bool unanimous() const { return named_ == 1; }
  std::uint8_t matched(Source source) const { return matched_[source]; }  // the level of its best witness
  std::span<const Name> candidates() const { return {candidates_.data(), static_cast<std::size_t>(elected_)}; }
  const Tally& operator[](Name name) const { return tallies_[name]; }
  // Calls visit(tally) for every token that was named, and for what is none of them.
  template <typename Visit>
  void each(Visit visit) const {
    for (int i = 0; i < named_; ++i) visit(tallies_[i]);
    visit(tallies_[kNoToken]);
  }

 private:
  static constexpr std::array<float, 16> kInverse = [] {
    std::array<float, 16> t{};
    for (int i = 0; i < 16; ++i) t[i] = 1.0f / static_cast<float>(1 + i);
    return t;
  }();

  int named_ = 0;
  int elected_ = 0;
  std::array<std::uint8_t, kSourceCount> matched_{};
  std::array<Name, kMaxCandidates> candidates_;
  std::array<Tally, kNoToken + 1> tallies_;
};

}  // namespace histospec
