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

// Who speaks for a token: what it shares with the context, and where it stands.
class Witness {
 public:
  Witness() = default;
  // `shared`: tokens of the context that stand before it, 1 ... kMaxOrder. `where`: the source's own name for its
  // response.
  Witness(std::uint8_t shared, Source source, std::uint16_t where = 0)
      : all_(std::uint32_t{shared} << 24 | std::uint32_t{source} << 16 | where) {}

  std::uint8_t shared() const { return static_cast<std::uint8_t>(all_ >> 24); }
  Source source() const { return static_cast<Source>(all_ >> 16 & 0xff); }
  std::uint16_t where() const { return static_cast<std::uint16_t>(all_); }

 private:
  std::uint32_t all_ = 0;  // in one piece, so that one can be chosen of two without a branch
};

// What was said for one token.
struct Tally {
  Token token = -1;
  Witness best = {};           // of the witnesses, the first that shares the most
  std::uint16_t count = 0;     // witnesses
  std::uint16_t at_level = 0;  // of them, at the level of the best
  float aligned = 0;           // votes of the history, less the further they stand from the session's own offset
  std::array<float, kSourceCount> votes = {};

  std::uint8_t level() const { return kLevelOf[best.shared()]; }
  float all() const { return votes[0] + votes[1] + votes[2] + votes[3]; }
};

class Evidence {
 public:
  using Name = std::uint8_t;
  // Of what followed where a response ended, or where the text was not generated; and of a token too many.
  static constexpr Name kNoToken = 15;

  Evidence() { guesses_.fill(kNoToken); }

  // What witnesses of this token call it.
  Name name(Token token) {
    Name& guess = guesses_[static_cast<std::uint32_t>(token) % kGuesses];
    if (tallies_[guess].token == token) return guess;
    const Name name = guess == kNoToken ? add(token) : find(token);
    if (name != kNoToken) guess = name;
    return name;
  }

  // A witness of the source shares so many tokens with the context.
  void match(Source source, std::uint8_t shared) { matched_[source] = std::max(matched_[source], kLevelOf[shared]); }

  // A witness speaks for a token. What they say follows no pattern, so nothing branches on it.
  void hear(Name name, Witness witness, float vote, float aligned = 0) {
    Tally& tally = tallies_[name];
    tally.votes[witness.source()] += vote;
    tally.aligned += aligned;
    ++tally.count;
    const int level = kLevelOf[witness.shared()], known = tally.level();
    tally.at_level = static_cast<std::uint16_t>((tally.at_level & -(level <= known)) + (level >= known));
    tally.best = witness.shared() > tally.best.shared() ? witness : tally.best;
  }

  // The vote of the witness that comes after `nearness` others of its kind.
  static float vote(int shared, int nearness) { return static_cast<float>(shared) * kInverse[nearness]; }
  // How much of a vote counts as aligned, so many tokens from the session's offset.
  static float alignment(int distance) {
    constexpr float kReach = 16;
    return kReach / (kReach + static_cast<float>(std::abs(distance)));
  }

  // Of the tokens named, keeps the best by votes: at most kMaxCandidates, and those with less than `share` of the votes
  // of the first are almost never right. Ties: the one named first.
  void elect(float share) {
    std::array<float, kMaxCandidates> votes;
    elected_ = 0;
    for (int i = 0; i < named_; ++i) {
      const float own = tallies_[i].all();
      if (elected_ == kMaxCandidates && own <= votes[kMaxCandidates - 1]) continue;
      int at = elected_ < kMaxCandidates ? elected_++ : kMaxCandidates - 1;
      for (; at > 0 && votes[at - 1] < own; --at) {
        votes[at] = votes[at - 1];
        candidates_[at] = candidates_[at - 1];
      }
      votes[at] = own;
      candidates_[at] = static_cast<Name>(i);
    }
    while (elected_ > 1 && votes[elected_ - 1] < share * votes[0]) --elected_;
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
  static constexpr std::size_t kGuesses = 16;

  Name find(Token token) {
    for (int i = 0; i < named_; ++i) {
      if (tallies_[i].token == token) return static_cast<Name>(i);
    }
    return add(token);
  }
  Name add(Token token) {
    if (named_ == kNoToken) return kNoToken;
    tallies_[named_].token = token;
    return static_cast<Name>(named_++);
  }

  static constexpr std::array<float, 16> kInverse = [] {
    std::array<float, 16> t{};
    for (int i = 0; i < 16; ++i) t[i] = 1.0f / static_cast<float>(1 + i);
    return t;
  }();

  int named_ = 0;
  int elected_ = 0;
  std::array<std::uint8_t, kSourceCount> matched_{};
  std::array<Name, kMaxCandidates> candidates_;
  std::array<Name, kGuesses> guesses_;  // who was named last, by the end of the token
  std::array<Tally, kNoToken + 1> tallies_;
};

}  // namespace histospec
