// How far to trust a twin: how often its next token was right, by how many tokens it had agreed with its session.
//
// One table per namespace. It learns from every token of a session with a twin and slowly forgets. It thereby follows
// how fast the policy changes. If sampling is not coupled, twins are soon wrong and no longer used.
#pragma once

#include <array>
#include <cstddef>

namespace histospec {

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
