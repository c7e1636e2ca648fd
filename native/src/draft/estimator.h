// The estimator: evidence -> the probability that a candidate is the next token.
//
// A small network that never stops learning, one a namespace: after every step, what was really generated moves it.
//
//     10 inputs of the candidate ---+--> 8 hidden (relu) --+--> log-odds --> p
//      5 rows of the position ------+----------------------+
//                                      2 biases of the token
//
// The inputs are log-odds of the votes and counts for the candidate (mixing such weak predictions in the logistic
// domain is M. Mahoney, "Adaptive weighing of context models for lossless data compression", Florida Tech TR
// CS-2005-16). The rows say what kind of position it is: how long the best match of each source is, and how many tokens
// were foreseen in a row; each row is a vector added to the hidden layer and a number added to the odds. The biases say
// which tokens, by themselves and after the one before, come more often than the evidence thinks; they start at 0.
//
// It starts from weights trained offline (starting_weights.h; scripts/train-estimator makes them), so that the first
// hundred tokens of a namespace are drafted well, and learns by gradient descent on the logistic loss.
//
// Cost: about 100 multiplications a candidate, twice that to learn from it; 131 KB a namespace, most of it the biases.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "draft/eight.h"
#include "draft/evidence.h"

namespace histospec {

class Estimator {
 public:
  // The first so many sources have inputs and rows of their own. What others say counts in the sums, until weights for
  // them are trained.
  static constexpr int kTrainedSources = 4;
  static constexpr int kInputs = 10;
  static constexpr int kContexts = kTrainedSources + 1;
  static constexpr int kHidden = 8;  // an Eight
  static constexpr int kRunClasses = 6;
  static constexpr int kRows = kTrainedSources * kLevels + kRunClasses;
  static constexpr int kBiasBits = 14;

  // What is known of the candidates of one position, in the order of evidence.candidates().
  struct Features {
    int size = 0;
    std::array<std::uint8_t, kContexts> rows;
    std::array<std::array<std::uint16_t, 2>, kMaxCandidates> slots;  // of the biases
    std::array<std::array<float, kInputs>, kMaxCandidates> x;
  };

  // `previous`: the newest token of the context, -1 if there is none; `run`: how many tokens in a row were foreseen.
  static void describe(const Evidence& evidence, Token previous, int run, Features& features);
  // The probability of each candidate to be the next token.
  void estimate(const Features& features, std::span<float, kMaxCandidates> probabilities) const;
  // `right`: the candidate, estimated at `probability`, was the token that came.
  void learn(const Features& features, int candidate, float probability, bool right);

  // The best candidate of several is right a little more or less often than it was estimated: what the first so many
  // tenths turned out to be, learned beside the network. `probability` is what estimate() said of it.
  float calibrated(float probability) const;
  void saw_best(float probability, bool right);

  // What steps have yielded lately, in tokens for the price of a plain step, when a drafted token costs `verify_cost`
  // of one, at least 1 and at `most` so much: what a drafted token has to compete with.
  float speed_up(float verify_cost, float most) const;
  // It gave so many tokens, and verified so many drafted ones, whoever drafted them.
  void saw_step(float tokens, float drafted);

  // Forgets what was learned.
  void reset() {
    net_.reset();
    yield_ = Yield();
    correction_ = Correction();
  }
  std::size_t bytes() const { return net_ ? sizeof(Net) : 0; }

  // What was learned, to be restored in another process; empty: nothing yet. restore() throws std::invalid_argument and
  // changes nothing when it cannot be used.
  std::string state() const;
  void restore(std::string_view state);

 private:
  struct Weights {
    std::array<Eight, kInputs> inputs;
    std::array<Eight, kRows> rows;
    Eight output;
    std::array<float, kRows> row_odds;
    std::array<float, kInputs> direct;
  };
  struct Net {
    Weights weights;
    std::array<std::array<float, 1 << kBiasBits>, 2> biases{};
  };
  static constexpr int kTenths = 10;
  struct Correction {
    std::array<float, kTenths> offset{};
    std::array<float, kTenths> seen{};
  };
  // Sums over the latest steps.
  struct Yield {
    float tokens = 220;
    float steps = 95;
    float drafted = 100;
  };

  template <typename AnyWeights, typename Visit>
  static void each_part(AnyWeights& weights, Visit visit);
  static const Weights& starting();
  const Weights& weights() const { return net_ ? net_->weights : starting(); }

  std::unique_ptr<Net> net_;  // none before anything was learned
  Yield yield_;
  Correction correction_;
};

}  // namespace histospec
