// The twins of a problem: the last response that was drawn with each seed. And how far to trust them.
//
// With coupled sampling the noise of a token is a function of the seed, the two tokens before it, and the number of
// times that this pair occurred before. A session therefore repeats the last response of its seed wherever the policy
// has not changed. That response is its twin. After a difference, the noise is the same again behind the same tokens,
// so the session follows the twin from there (DraftContext::synchronise).
//
// A twin is one piece of text that never changes, 4 bytes per token; a draft is the text that follows in it. Its key is
// the seed and the position at which it begins, which tells the turns of one trajectory apart. It ends where the first
// tool or user turn begins, because the worker opens a new session behind that turn.
//
// Sessions hold weak references to their twins: eviction may free one at any time.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "histospec/types.h"

namespace histospec {

using Twin = std::vector<Token>;

class Twins {
 public:
  // How many of the newest epochs keep their twins. A seed either comes back in every epoch or never, so a twin that
  // was not replaced for a whole epoch will not be used again.
  static constexpr std::size_t kEpochs = 2;

  struct Key {
    std::int64_t seed;
    std::size_t start;  // tokens before the twin
    auto operator<=>(const Key&) const = default;
  };

  // The response as a twin; null if it has no seed or does not begin with a generated token.
  static std::shared_ptr<const Twin> of(const ResponseView& response);

  // Adds a twin. It replaces a twin with the same key of the same or an older epoch. A `stored` twin, which is older
  // than the others of its epoch, replaces only those of older epochs. May throw std::bad_alloc; then the twin is not
  // added.
  void add(Key key, std::int64_t epoch, std::shared_ptr<const Twin> twin, bool stored = false);
  // Null if there is none.
  std::shared_ptr<const Twin> find(Key key) const;

  std::size_t bytes() const { return sizeof(*this) + held_bytes_; }
  // Throws std::logic_error naming the invariant that fails.
  void check_integrity() const;

 private:
  using Epoch = std::map<Key, std::shared_ptr<const Twin>>;

  static std::size_t bytes_of(const Twin& twin);
  void forget(Epoch& epoch, Key key);

  std::map<std::int64_t, Epoch> epochs_;  // a key stands in one of them only
  std::size_t held_bytes_ = 0;
};

// How far a session agrees with its twin.
struct Agreement {
  int streak = 0;        // how many of the last tokens agreed, without a gap
  bool faithful = true;  // whether all tokens agreed
  bool shifted = false;  // whether the session follows the twin at another position than its own

  void saw(bool agreed) {
    streak = agreed ? streak + 1 : 0;
    faithful = faithful && agreed;
  }
};

// How far to trust a twin: how often its next token was right, by how many tokens it had agreed with its session.
//
// One table per namespace. It learns from every token of a session with a twin and slowly forgets. It thereby follows
// how fast the policy changes. If sampling is not coupled, twins are soon wrong and no longer used.
class TwinTrust {
 public:
  // Streaks of 0, 1, 2, 3-4, 5-8, ... and more than 64.
  static constexpr int kClasses = 9;

  // The probability that the twin's next token is right.
  float of(const Agreement& agreement) const { return right_[kind_of(agreement)][class_of(agreement.streak)]; }
  // Counts whether the twin's next token was right after such an agreement.
  void learn(const Agreement& agreement, bool right);

 private:
  using Table = std::array<std::array<float, kClasses>, 3>;  // [kind][class of the streak]

  // Diverged, faithful, shifted.
  static std::size_t kind_of(const Agreement& agreement) { return agreement.faithful ? 1 : agreement.shifted ? 2 : 0; }
  static std::size_t class_of(int streak);

  // Starting values: typical of a policy between two epochs.
  Table right_ = {{{.3f, .5f, .65f, .8f, .88f, .93f, .96f, .98f, .985f},
                   {.9f, .92f, .94f, .95f, .96f, .97f, .975f, .98f, .985f},
                   {.3f, .5f, .65f, .7f, .8f, .88f, .92f, .95f, .97f}}};
  Table seen_{};  // how many tokens each entry has learned from, up to a limit
};

}  // namespace histospec
