// The estimator: evidence -> the probability that a candidate is the next token.
//
// Logistic mixing as context-mixing compressors do it (M. Mahoney, "Adaptive weighing of context models for lossless
// data compression", Florida Tech TR CS-2005-16): every source and context length is a weak prediction; its log-odds
// are weighed, summed and squashed, p = 1 / (1 + exp(-w . x)). There is one weight vector for each class of how long
// the longest matches are. After every step, what was really generated moves the weights: w += rate (y - p) x.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "evidence.h"

namespace histospec {

class Estimator {
 public:
  // kSourceCount x kOrderCount predictions, then: aligned position, bias, log of the count, longest match.
  static constexpr int kFeatures = kSourceCount * kOrderCount + 4;

  // One candidate's predictions in steps of 1/8, with the weight vector that mixes them. Small, because every
  // drafted position keeps its candidates until the engine says which was right.
  struct Features {
    std::uint16_t bucket;
    std::array<std::int8_t, kFeatures> x;
  };

  static Features features(const Evidence& evidence, int candidate);
  float probability(const Features& features) const;
  // `right`: the candidate, estimated at `probability`, was the token that came.
  void learn(const Features& features, float probability, bool right);

  std::size_t bytes() const { return weights_.capacity() * sizeof(weights_[0]); }

 private:
  using Weights = std::array<float, kFeatures>;
  static const Weights& initial();
  const Weights& weights(int bucket) const { return weights_.empty() ? initial() : weights_[bucket]; }

  std::vector<Weights> weights_;  // one a bucket; none before anything was learned
};

}  // namespace histospec
