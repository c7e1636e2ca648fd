// What the policy's own probabilities at the matches say of the next token.
//
// A response of coupled sampling comes with the alternatives of its tokens (index/alternatives.h). So a match tells
// more than the token that followed there: it tells how probable that token was, and what else was probable. Here the
// longest matches of a context are averaged, because shorter matches mislead. Each epoch takes a fifth of the weight of
// a match, because the policy moves.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "draft/evidence.h"
#include "index/alternatives.h"

namespace histospec {

class Likelihood {
 public:
  // The weight of a match of this age in epochs.
  static float weight(std::uint8_t age) { return kOfAge[age]; }

  // Adds a match: the token that followed there, and the alternatives of its place.
  void add(Token followed, Alternatives place, float weight) {
    total_ += weight;
    add(followed, weight * (place.count() == 0 ? kAlone : place.sampled_probability()));
    for (int i = 0; i < place.count(); ++i) add(place.token(i), weight * place.probability(i));
  }

  bool empty() const { return total_ == 0; }
  // The average probability of a token.
  float of(Token token) const {
    for (int i = 0; i < size_; ++i) {
      if (tokens_[i] == token) return mass_[i] / total_;
    }
    return 0;
  }
  // All tokens that it has, in no order.
  std::span<const Token> tokens() const { return {tokens_.data(), static_cast<std::size_t>(size_)}; }

 private:
  // The probability of a token at a place without alternatives: nothing else had 5 %.
  static constexpr float kAlone = 0.97f;
  static constexpr int kMost = 12;

  static constexpr std::array<float, kOldest + 1> kOfAge = {1.0f, 0.8f, 0.64f, 0.512f, 0.41f};

  void add(Token token, float mass) {
    int i = 0;
    while (i < size_ && tokens_[i] != token) ++i;
    if (i == size_) {
      if (size_ == kMost) return;
      tokens_[size_++] = token;
      mass_[i] = 0;
    }
    mass_[i] += mass;
  }

  float total_ = 0;
  int size_ = 0;
  std::array<Token, kMost> tokens_;
  std::array<float, kMost> mass_;
};

}  // namespace histospec
