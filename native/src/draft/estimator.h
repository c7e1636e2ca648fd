// The estimator: evidence -> the probability that a candidate is the next token.
//
// A small network for each namespace. It learns from every step, by comparing its estimates with the generated tokens.
//
//     10 inputs of the candidate ---+--> 8 hidden (relu) --+--> log-odds --> p
//      5 rows of the position ------+----------------------+
//                                      2 biases of the token
//
// The inputs are log-odds of the votes and counts for the candidate (mixing such weak predictions in the logistic
// domain is M. Mahoney, "Adaptive weighing of context models for lossless data compression", Florida Tech TR
// CS-2005-16). The rows describe the position: the length of the best match of each source, and how many tokens in a
// row were predicted. Each row is a vector added to the hidden layer and a number added to the log-odds. The biases
// correct for tokens that come more often than the evidence says, on their own and after the previous token; they start
// at 0.
//
// The network starts from weights trained offline (starting_weights.h, made by scripts/train-estimator), so that the
// first hundred tokens of a namespace get good drafts. It learns by gradient descent on the logistic loss.
//
// Cost: about 100 multiplications per candidate, twice that to learn from it; 131 KB per namespace, most of it biases.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "draft/evidence.h"
#include "draft/foresight.h"
#include "draft/network.h"

namespace histospec {

class Estimator {
 public:
  // The first kTrainedSources sources have inputs and rows of their own. The others count in the sums only, until
  // weights for them are trained.
  static constexpr int kTrainedSources = 4;
  static constexpr int kInputs = 10;
  static constexpr int kContexts = kTrainedSources + 1;
  static constexpr int kHidden = 8;  // an Eight
  static constexpr int kRunClasses = 6;
  static constexpr int kRows = kTrainedSources * kLevels + kRunClasses;
  static constexpr int kBiasBits = 14;

  // The features of the candidates of one position, in the order of evidence.candidates().
  struct Features {
    int size = 0;
    std::array<std::uint8_t, kContexts> rows;
    std::array<std::array<std::uint16_t, 2>, kMaxCandidates> slots;  // of the biases
    std::array<std::array<float, kInputs>, kMaxCandidates> x;
  };

  // `previous`: the newest token of the context, -1 if there is none; `run`: how many tokens in a row were predicted.
  static void describe(const Evidence& evidence, Token previous, int run, Features& features);
  // The log-odds of the candidate's share of all matches, and of the longest ones.
  static std::array<float, 2> shares(const Features& features, std::size_t candidate) {
    return {features.x[candidate][6], features.x[candidate][7]};
  }
  // The probability of each candidate to be the next token.
  void estimate(const Features& features, std::span<float, kMaxCandidates> probabilities) const;
  // `right`: whether the candidate, estimated at `probability`, was the next token.
  void learn(const Features& features, int candidate, float probability, bool right);

  // The best of several candidates is right a little more or less often than estimated. The estimator learns a
  // correction for each tenth of the probability and applies it here. `probability` is the result of estimate().
  float calibrated(float probability) const { return correction_.corrected(probability); }
  void saw_best(float probability, bool right) { correction_.saw(probability, right); }

  // The estimates of sessions whose noise is known.
  Foresight foresight;

  // The speed-up of the latest steps: tokens for the price of a plain step if a drafted token costs `verify_cost` of
  // it; at least 1 and at most `most`. A drafted token has to yield more than this.
  float speed_up(float verify_cost, float most) const;
  // Counts a step: how many tokens it gave, and how many drafted tokens it verified, of any drafter.
  void saw_step(float tokens, float drafted);

  // Forgets what was learned.
  void reset() { *this = Estimator(); }
  std::size_t bytes() const { return net_ ? sizeof(Net) : 0; }

  // The learned state, for restore() in this or another process; empty if there is none yet. It is a line with the
  // version, and each learned number as a float32, little-endian. restore() throws std::invalid_argument and changes
  // nothing if it cannot use the state.
  std::string state();
  void restore(std::string_view state);

 private:
  using Weights = Network<kInputs, kRows>;
  struct Net {
    Weights weights;
    std::array<std::array<float, 1 << kBiasBits>, 2> biases{};
  };
  // Sums over the latest steps.
  struct Yield {
    float tokens = 220;
    float steps = 95;
    float drafted = 100;
  };

  // Visits the learned numbers in the order in which they are saved. There is a net.
  template <typename Visit>
  void each(Visit& visit) {
    visit(yield_.tokens), visit(yield_.steps), visit(yield_.drafted);
    correction_.each(visit);
    net_->weights.each(visit);
    each_number(net_->biases, visit);
    foresight.each(visit);
  }

  static const Weights& starting();
  const Weights& weights() const { return net_ ? net_->weights : starting(); }

  std::unique_ptr<Net> net_;  // null until the estimator learns
  Yield yield_;
  Correction correction_;
};

}  // namespace histospec
