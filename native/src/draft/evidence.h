// Evidence for the next token: the matches of the context, and which token followed each of them.
//
// A match is a position in a text where the end of the context occurred before. It votes for the token that followed
// there. A vote grows with the match length and shrinks with the number of nearer matches of its kind. Evidence keeps
// one tally per token.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <numeric>
#include <span>

#include "histospec/types.h"

namespace histospec {

// Where a match stands: in the problem's finished responses, in the session's own text or prompt, in the text of its
// siblings, or in other problems of the namespace. The twin gives drafts without matches. The model is the worker's own
// drafter; it gives no evidence, and the engine only counts its tokens.
enum Source : std::uint8_t { kHistory, kOwn, kSiblings, kNamespace, kSourceCount, kTwin = kSourceCount, kModel };

inline constexpr int kMaxCandidates = 4;

// Responses of this age in epochs, or older, are counted together.
inline constexpr int kOldest = 4;

// The least match length of each level. Beyond a few tokens only the order of magnitude counts.
inline constexpr std::array<int, 10> kOrders = {1, 2, 3, 4, 6, 8, 11, 16, 22, 32};
inline constexpr int kLevels = static_cast<int>(kOrders.size()) + 1;  // level 0: no match
inline constexpr std::array<std::uint8_t, kMaxOrder + 1> kLevelOf = [] {
  std::array<std::uint8_t, kMaxOrder + 1> t{};
  for (int length = 0; length <= kMaxOrder; ++length) {
    for (int order : kOrders) t[length] = static_cast<std::uint8_t>(t[length] + (order <= length));
  }
  return t;
}();

// A match of the context: its length, and where it stands.
class Match {
 public:
  Match() = default;
  // `length`: how many tokens of the end of the context stand there, 1 ... kMaxOrder. `epoch_id`: the epoch of the
  // response, which only its source can read (SegmentSource::age).
  Match(std::uint8_t length, Source source, std::uint16_t epoch_id = 0)
      : all_(std::uint32_t{length} << 24 | std::uint32_t{source} << 16 | epoch_id) {}

  std::uint8_t length() const { return static_cast<std::uint8_t>(all_ >> 24); }
  Source source() const { return static_cast<Source>(all_ >> 16 & 0xff); }
  std::uint16_t epoch_id() const { return static_cast<std::uint16_t>(all_); }

 private:
  std::uint32_t all_ = 0;  // one word, so that choosing one of two matches needs no branch
};

// The matches followed by one token.
struct Tally {
  Token token = -1;
  Match best = {};             // the first of the longest matches
  std::uint16_t count = 0;     // of matches
  std::uint16_t at_level = 0;  // of matches at the level of the best
  float aligned = 0;           // votes of the history, weighted by how near they stand to the session's own offset
  std::array<float, kSourceCount> votes = {};

  std::uint8_t level() const { return kLevelOf[best.length()]; }
  float all() const { return std::accumulate(votes.begin(), votes.end(), 0.0f); }
};

class Evidence {
 public:
  using Name = std::uint8_t;
  // Collects matches whose response ended, whose next token was not generated, or for whose token no name was left.
  static constexpr Name kNoToken = 15;

  Evidence() { guesses_.fill(kNoToken); }

  // The short name of a token in this evidence, for add_match().
  Name name(Token token) {
    Name& guess = guesses_[static_cast<std::uint32_t>(token) % kGuesses];
    if (tallies_[guess].token == token) return guess;
    const Name name = guess == kNoToken ? add(token) : find(token);
    if (name != kNoToken) guess = name;
    return name;
  }

  // Notes that the source has a match of this length.
  void note_match_length(Source source, std::uint8_t length) {
    longest_[source] = std::max(longest_[source], kLevelOf[length]);
  }

  // Adds a match followed by the token `name`. It avoids branches, because matches come in no predictable pattern.
  void add_match(Name name, Match match, float vote, float aligned = 0) {
    Tally& tally = tallies_[name];
    tally.votes[match.source()] += vote;
    tally.aligned += aligned;
    ++tally.count;
    const int level = kLevelOf[match.length()], known = tally.level();
    tally.at_level = static_cast<std::uint16_t>((tally.at_level & -(level <= known)) + (level >= known));
    tally.best = match.length() > tally.best.length() ? match : tally.best;
  }

  // The vote of a match with `nearness` nearer matches of its kind.
  static float vote(int match_length, int nearness) { return static_cast<float>(match_length) * kInverse[nearness]; }
  // The share of a vote that counts as aligned, `distance` tokens from the session's offset.
  static float alignment(int distance) {
    constexpr float kReach = 16;
    return kReach / (kReach + static_cast<float>(std::abs(distance)));
  }

  // Picks the tokens with the most votes as candidates: at most kMaxCandidates, each with at least `share` of the votes
  // of the first. Tokens with fewer votes are almost never right. Of two with equal votes, the one named first leads.
  void pick_candidates(float share) {
    std::array<float, kMaxCandidates> votes;
    picked_ = 0;
    for (int i = 0; i < named_; ++i) {
      const float own = tallies_[i].all();
      if (picked_ == kMaxCandidates && own <= votes[kMaxCandidates - 1]) continue;
      int at = picked_ < kMaxCandidates ? picked_++ : kMaxCandidates - 1;
      for (; at > 0 && votes[at - 1] < own; --at) {
        votes[at] = votes[at - 1];
        candidates_[at] = candidates_[at - 1];
      }
      votes[at] = own;
      candidates_[at] = static_cast<Name>(i);
    }
    while (picked_ > 1 && votes[picked_ - 1] < share * votes[0]) --picked_;
  }

  bool unanimous() const { return named_ == 1; }
  std::uint8_t longest_level(Source source) const { return longest_[source]; }  // 0: no match
  std::span<const Name> candidates() const { return {candidates_.data(), static_cast<std::size_t>(picked_)}; }
  const Tally& operator[](Name name) const { return tallies_[name]; }
  // Calls visit(tally) for every named token, and for kNoToken.
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
  int picked_ = 0;
  std::array<std::uint8_t, kSourceCount> longest_{};
  std::array<Name, kMaxCandidates> candidates_;
  std::array<Name, kGuesses> guesses_;  // by the low bits of a token: the last name of such a token
  std::array<Tally, kNoToken + 1> tallies_;
};

}  // namespace histospec
