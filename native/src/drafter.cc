#include "drafter.h"

namespace histospec {
namespace {

// A drafted token must promise a little more than what its cost would yield otherwise: later positions of a draft are
// estimated from text that may not come.
constexpr float kMargin = 1.1f;

// A history that knows a context of so many tokens is not helped by what other problems say, and that costs the most.
constexpr int kSureOrder = 6;

// Of the votes of the best candidate: with less, one is not estimated.
constexpr float kUnlikelyShare = 0.1f;

}  // namespace

int Viewpoint::catch_up() {
  history.catch_up(context.tokens());
  const int depth = history.depth();
  if (depth < kSureOrder) elsewhere.catch_up(context.tokens());
  return depth;
}

Evidence gather(Viewpoint& view, const LiveSource& live) {
  Evidence evidence;
  const Tokens context = view.context.tokens();
  const int depth = view.catch_up();
  view.history.testify(kHistory, view.generated, view.newest, evidence);
  if (depth < kSureOrder || !evidence.unanimous()) live.testify(context, evidence);
  if (depth < kSureOrder) view.elsewhere.testify(kNamespace, view.generated, view.newest, evidence);
  evidence.elect(kUnlikelyShare);
  return evidence;
}

void draft(Viewpoint& view, const LiveSource& live, const Estimator& estimator, DraftLimits limits, Draft& draft) {
  draft.clear();
  const float least = limits.verify_cost * kMargin * estimator.speed_up(limits.verify_cost) / limits.tail_weight;
  float survival = 1.0f;
  for (int drafted = 0; drafted < limits.max_tokens; ++drafted) {
    const Evidence evidence = gather(view, live);
    const Tokens context = view.context.tokens();
    if (evidence.candidates().empty()) break;

    Prediction& prediction = draft.predictions.emplace_back();
    Estimator::describe(evidence, context.empty() ? -1 : context.back(), view.run, prediction.features);
    estimator.estimate(prediction.features, prediction.probabilities);
    prediction.best = 0;
    for (std::uint8_t c = 0; c < prediction.features.size; ++c) {
      prediction.tokens[c] = evidence[evidence.candidates()[c]].token;
      if (prediction.probabilities[c] > prediction.probabilities[prediction.best]) prediction.best = c;
    }
    const Tally& best = evidence[evidence.candidates()[prediction.best]];
    prediction.source = best.source;
    prediction.age = best.age;

    const float probability = estimator.calibrated(prediction.probabilities[prediction.best]);
    survival *= probability;
    if (survival < least) break;
    draft.tokens.push_back(prediction.token());
    draft.probabilities.push_back(probability);
    view.context.push(prediction.token());
    view.history.advance(1);
    view.elsewhere.advance(1);
    ++view.generated;
    ++view.run;
  }
}

int learn(Estimator& estimator, const Draft& draft, Tokens came, Viewpoint& view) {
  int accepted = 0;
  bool foreseen = true;
  for (std::size_t i = 0; i < came.size(); ++i) {
    if (!foreseen || i >= draft.predictions.size()) {
      view.run = 0;
      break;
    }
    const Prediction& prediction = draft.predictions[i];
    for (int c = 0; c < prediction.features.size; ++c) {
      estimator.learn(prediction.features, c, prediction.probabilities[c], prediction.tokens[c] == came[i]);
    }
    foreseen = prediction.token() == came[i];
    estimator.saw_best(prediction.probabilities[prediction.best], foreseen);
    view.run = foreseen ? view.run + 1 : 0;
    accepted += foreseen && i < draft.tokens.size();
  }
  estimator.saw_step(accepted + 1, draft.tokens.size());
  return accepted;
}

}  // namespace histospec
