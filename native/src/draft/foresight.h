// Foresight: the probability of a candidate, once the noise of the candidates' tokens is known.
//
// Coupled sampling takes the token with the largest sum of log-probability and noise (noise.h). Where a session has a
// seed, the engine knows the noise of every candidate. A candidate of probability p then comes if its sum is larger
// than those of the other candidates, and larger than that of any other token. The largest sum of tokens of probability
// r together is log r plus Gumbel noise. The probabilities are estimates, so a small network learns how far to trust
// each of the two margins, by the length of the match.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>

#include "draft/network.h"
#include "draft/noise.h"

namespace histospec {

class Foresight {
 public:
  static constexpr int kInputs = 8;
  static constexpr int kRows = 50;  // those of the estimator
  using Weights = Network<kInputs, kRows>;
  using Inputs = std::array<Weights::Inputs, kMaxCandidates>;

  // `probabilities`: of the candidates, by the estimator; `noise`: of their tokens.
  static void describe(std::span<const float> probabilities, std::span<const float, kMaxCandidates> noise,
                       Inputs& inputs);
  // The probability of each candidate to be the next token. `rows`: of the position.
  void estimate(std::span<const std::uint8_t> rows, const Inputs& inputs, std::span<float> probabilities) const;
  void learn(std::span<const std::uint8_t> rows, const Weights::Inputs& inputs, float probability, bool right);

  Correction correction;
  std::size_t bytes() const { return learned_ ? sizeof(Weights) : 0; }
  void reset() { learned_.reset(), correction = Correction(); }

 private:
  static const Weights& starting();
  const Weights& weights() const { return learned_ ? *learned_ : starting(); }

  std::unique_ptr<Weights> learned_;  // null until it learns
};

}  // namespace histospec
