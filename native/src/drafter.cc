#include "drafter.h"

namespace histospec {
namespace {

// A step with drafts yields about this many tokens for the price of one: a drafted token must promise more than its
// cost at that rate.
constexpr float kSpeedUp = 2.2f;

// A history that knows a context of so many tokens is not helped by what other problems say, and that costs the most.
constexpr int kSureOrder = 10;

// Of the votes of the best candidate: with less, one is not estimated.
constexpr float kUnlikelyShare = 0.1f;

}  // namespace

void draft(Viewpoint& view, LiveSource live, const Estimator& estimator, DraftLimits limits, std::vector<Token>& tokens,
           std::vector<float>& probabilities, std::vector<Prediction>& predictions) {
  predictions.clear();
  float survival = 1.0f;
  for (int drafted = 0; drafted < limits.max_tokens; ++drafted) {
    Evidence evidence;
    live.find(view.context.tokens());
    view.history.catch_up(view.context.tokens());
    view.history.propose(evidence.candidates);
    live.propose(evidence.candidates);
    const bool ask_elsewhere = view.history.depth() < kSureOrder;
    if (ask_elsewhere) {
      view.elsewhere.catch_up(view.context.tokens());
      view.elsewhere.propose(evidence.candidates);
    }
    evidence.candidates.elect();
    evidence.candidates.drop_unlikely(kUnlikelyShare);
    if (evidence.candidates.size() == 0) break;
    view.history.count(evidence.candidates, evidence.counts[kHistory]);
    view.history.count_aligned(view.generated, evidence);
    if (ask_elsewhere) view.elsewhere.count(evidence.candidates, evidence.counts[kNamespace]);
    live.count(evidence);

    Prediction& prediction = predictions.emplace_back();
    prediction.size = evidence.candidates.size();
    int best = 0;
    for (int c = 0; c < prediction.size; ++c) {
      prediction.tokens[c] = evidence.candidates[c];
      prediction.features[c] = Estimator::features(evidence, c);
      prediction.probabilities[c] = estimator.probability(prediction.features[c]);
      if (prediction.probabilities[c] > prediction.probabilities[best]) best = c;
    }
    std::swap(prediction.tokens[0], prediction.tokens[best]);
    std::swap(prediction.features[0], prediction.features[best]);
    std::swap(prediction.probabilities[0], prediction.probabilities[best]);

    survival *= prediction.probabilities[0];
    if (survival < limits.verify_cost * kSpeedUp) break;
    const Token token = prediction.tokens[0];
    tokens.push_back(token);
    probabilities.push_back(prediction.probabilities[0]);
    view.context.push(token);
    view.history.advance(1);
    view.elsewhere.advance(1);
    ++view.generated;
  }
}

int learn(Estimator& estimator, std::span<const Prediction> predictions, std::size_t drafted, Tokens came) {
  int accepted = 0;
  for (std::size_t i = 0; i < predictions.size() && i < came.size(); ++i) {
    const Prediction& prediction = predictions[i];
    for (int c = 0; c < prediction.size; ++c) {
      estimator.learn(prediction.features[c], prediction.probabilities[c], prediction.tokens[c] == came[i]);
    }
    if (prediction.tokens[0] != came[i]) break;
    accepted += i < drafted;
  }
  return accepted;
}

}  // namespace histospec
