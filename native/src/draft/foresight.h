// Foresight: the probability of a candidate, once the noise of the candidates' tokens is known.
//
// Coupled sampling takes the token with the largest sum of log-probability and noise (noise.h). Where a session has a
// seed, the engine knows the noise of every candidate. The contenders are the two candidates with the largest sums. A
// contender of probability p comes if its sum is larger than that of the other, and larger than that of any token that
// is not a candidate. The largest sum of tokens of probability r together is log r plus Gumbel noise. The probabilities
// are estimates, so a small network learns how far to trust each of the two margins. Its rows are those of the
// estimator. The network starts from weights trained offline (foresight_weights.h, made by
// scripts/train-foresight). The estimator itself never sees noise, so it learns the same with and without seeds.
//
// A seed says nothing where a worker samples in another way. So foresight counts how often the noise corrects the
// estimator and how often it misleads it, and drafts follow it as long as it corrects.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>

#include "draft/evidence.h"
#include "draft/network.h"

namespace histospec {

class Foresight {
 public:
  static constexpr int kInputs = 10;
  static constexpr int kRows = 50;  // those of the estimator
  using Weights = Network<kInputs, kRows>;
  using PerCandidate = std::array<float, kMaxCandidates>;

  struct Contenders {
    std::size_t size;                       // 1 or 2
    std::array<std::size_t, 2> candidates;  // the one with the largest sum first
    std::array<Weights::Inputs, 2> inputs;
    std::array<float, 2> probabilities;  // of each to be the next token

    std::size_t best() const { return size == 2 && probabilities[1] > probabilities[0]; }
  };

  // Where a candidate is this probable without the noise, by the estimator or to the policy at a match, the noise
  // changes too little to be worth its time.
  static constexpr float kSureAlone = 0.8f;

  // Picks the contenders and describes them. `probabilities`: of the candidates, 0 behind the last one; `noise`: of
  // their tokens; `shares`: of each candidate, the log-odds of its share of all matches, and of the longest ones.
  static void describe(std::size_t candidates, const PerCandidate& probabilities, const PerCandidate& noise,
                       const std::array<std::array<float, 2>, kMaxCandidates>& shares, Contenders& contenders);
  // Writes the probabilities of the contenders. `rows`: of the position.
  void estimate(std::span<const std::uint8_t> rows, Contenders& contenders) const;
  // `right`: the candidate that was the next token, any other number if none was.
  void learn(std::span<const std::uint8_t> rows, const Contenders& contenders, std::size_t right);

  float calibrated(float probability) const { return correction_.corrected(probability); }
  void saw_best(float probability, bool right) { correction_.saw(probability, right); }

  // Whether drafts should follow the noise.
  bool trusted() const { return score_ > kLeastScore; }
  // Notes which choice was right where the choices with and without the noise differed.
  void compare(bool with_noise, bool alone) {
    score_ = std::clamp(score_ + static_cast<float>(with_noise) - static_cast<float>(alone), 2 * kLeastScore, 0.0f);
  }

  // Whether to learn from this position. A part of them is enough, because the starting weights fit most texts.
  bool wants_to_learn() { return positions_++ % kLearnsEvery == 0; }

  // Visits the learned numbers in the order in which they are saved.
  template <typename Visit>
  void each(Visit& visit) {
    correction_.each(visit);
    visit(score_);
    weights_.each(visit);
  }
  // Whether numbers that were read make sense.
  bool valid() const { return correction_.valid(); }

 private:
  static const Weights& starting();

  static constexpr float kLeastScore = -20;
  static constexpr unsigned kLearnsEvery = 8;

  Weights weights_ = starting();
  Correction correction_;
  float score_ = 0;  // corrected minus misled, at most 0
  unsigned positions_ = 0;
};

}  // namespace histospec
