// How far to trust a twin: how often it was right next, after agreeing with its session for so long.
//
// A table, one a namespace, that every token of a session with a twin teaches, and that slowly forgets. So it knows how
// fast the policy moves, and that a sampler is not coupled: then twins are soon wrong, and left alone.
#pragma once

#include <array>
#include <cstddef>

namespace histospec {

// How far a session agrees with its twin.
struct Agreement {
  int streak = 0;        // the last so many tokens did
  bool faithful = true;  // all did, from the first on
  bool shifted = false;  // it is followed at another position than the session's own

  void saw(bool agreed) {
    streak = agreed ? streak + 1 : 0;
    faithful = faithful && agreed;
  }
};

class TwinTrust {
 public:
  // Streaks of 0, 1, 2, 3-4, 5-8, ... and more than 64.
  static constexpr int kClasses = 9;

  // The probability that the twin is right about the next token.
  float of(const Agreement& agreement) const { return right_[kind_of(agreement)][class_of(agreement.streak)]; }
  // It was, or was not, when they agreed so far.
  void learn(const Agreement& agreement, bool right);

 private:
  using Table = std::array<std::array<float, kClasses>, 3>;  // [kind][class of the streak]

  // Diverged, faithful, shifted.
  static std::size_t kind_of(const Agreement& agreement) { return agreement.faithful ? 1 : agreement.shifted ? 2 : 0; }
  static std::size_t class_of(int streak);

  // What it starts from: typical of a policy between two epochs.
  Table right_ = {{{.3f, .5f, .65f, .8f, .88f, .93f, .96f, .98f, .985f},
                   {.9f, .92f, .94f, .95f, .96f, .97f, .975f, .98f, .985f},
                   {.3f, .5f, .65f, .7f, .8f, .88f, .92f, .95f, .97f}}};
  Table seen_{};  // tokens that taught, up to what is remembered
};

}  // namespace histospec
