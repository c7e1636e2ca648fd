#include "draft/drafter.h"

#include <algorithm>

namespace histospec {
namespace {

// A drafted token must promise a little more than what its cost would yield otherwise: later positions of a draft are
// estimated from text that may not come.
constexpr float kMargin = 1.1f;

// Nobody is asked for a next token where one of so much probability would not be drafted: most that come last are less
// probable, and what the others add to a draft is worth little more than its cost.
constexpr float kHopeful = 0.7f;

// A history that knows a context of so many tokens is not helped by what other problems say, and that costs the most.
constexpr int kSureOrder = 6;

// Of the votes of the best candidate: with less, one is not estimated.
constexpr float kUnlikelyShare = 0.1f;

// A twin that is right so often is asked alone: what others say costs more than it adds.
constexpr float kSure = 0.8f;

// What a step is believed to yield, at most, for the price of one; sessions that follow twins yield more.
constexpr float kMostSpeedUp = 4, kMostOfTwins = 32;

// What is drafted at one position.
struct Choice {
  Token token = -1;  // none
  float probability = 0;
  Origin origin = {};
};

// Drafts what the evidence says, where that is more probable than what was chosen so far.
void weigh(Viewpoint& view, const LiveSource& live, const Estimator& estimator, Draft& draft, Choice& choice) {
  const Evidence evidence = gather(view, live);
  if (evidence.candidates().empty()) return;
  const Tokens context = view.context.tokens();
  Prediction& prediction = draft.predictions.emplace_back();
  prediction.position = draft.tokens.size();
  Estimator::describe(evidence, context.empty() ? -1 : context.back(), view.run, prediction.features);
  estimator.estimate(prediction.features, prediction.probabilities);
  prediction.best = 0;
  for (std::uint8_t c = 0; c < prediction.features.size; ++c) {
    prediction.tokens[c] = evidence[evidence.candidates()[c]].token;
    if (prediction.probabilities[c] > prediction.probabilities[prediction.best]) prediction.best = c;
  }
  const float probability = estimator.calibrated(prediction.probabilities[prediction.best]);
  if (probability <= choice.probability) return;
  const Tally& best = evidence[evidence.candidates()[prediction.best]];
  const Source source = best.best.source();
  const std::uint8_t age = source == kHistory ? view.history.age(best.best.where(), view.newest) : 0;
  choice = {best.token, probability, {source, age}};
}

}  // namespace

int Viewpoint::catch_up() {
  history.catch_up(context.tokens());
  const int depth = history.depth();
  if (depth < kSureOrder) elsewhere.catch_up(context.tokens());
  return depth;
}

void Viewpoint::synchronise() {
  const Tokens said = context.tokens();
  const std::int64_t at = generated + shift, end = static_cast<std::int64_t>(twin.size());
  if (generated < kInStep) return;
  const Tokens last = said.last(kInStep);
  const auto stands = [&](std::int64_t before) {
    return before >= kInStep && before <= end && std::ranges::equal(twin.subspan(before - kInStep, kInStep), last);
  };
  for (std::int64_t distance = 1; distance <= kReach; ++distance) {
    const std::int64_t by = stands(at + distance) ? distance : stands(at - distance) ? -distance : 0;
    if (by == 0) continue;
    shift += by;
    agreement = {kInStep, false, shift != 0};
    return;
  }
}

Evidence gather(Viewpoint& view, const LiveSource& live) {
  Evidence evidence;
  const Tokens context = view.context.tokens();
  const int depth = view.catch_up();
  view.history.testify(kHistory, view.generated, evidence);
  if (depth < kSureOrder || !evidence.unanimous()) live.testify(context, evidence);
  if (depth < kSureOrder) view.elsewhere.testify(kNamespace, view.generated, evidence);
  evidence.elect(kUnlikelyShare);
  return evidence;
}

bool twin_alone(const Viewpoint& view, const TwinTrust& trust) {
  return view.next_of_twin() && trust.of(view.agreement) >= kSure;
}

void draft(Viewpoint& view, const LiveSource& live, const Estimator& estimator, const TwinTrust& trust,
           DraftLimits limits, Draft& draft) {
  draft.clear();
  const float speed_up = estimator.speed_up(limits.verify_cost, view.twin.empty() ? kMostSpeedUp : kMostOfTwins);
  const float least = limits.verify_cost * kMargin * speed_up;
  float survival = 1.0f;
  for (int drafted = 0; drafted < limits.max_tokens; ++drafted) {
    Choice choice;
    if (const Token* twin = view.next_of_twin()) choice = {*twin, trust.of(view.agreement), {kTwin, 0}};
    if (choice.probability < kSure) {
      if (drafted > 0 && survival * std::max(kHopeful, choice.probability) < least) break;
      weigh(view, live, estimator, draft, choice);
      view.history.mark(draft.history, draft.tokens.size());
      view.elsewhere.mark(draft.elsewhere, draft.tokens.size());
    }
    if (choice.token < 0) break;

    survival *= choice.probability;
    if (survival < least) break;
    draft.tokens.push_back(choice.token);
    draft.probabilities.push_back(choice.probability);
    draft.origins.push_back(choice.origin);
    view.push(choice.token);
    view.history.advance(1);
    view.elsewhere.advance(1);
    ++view.run;
  }
}

int learn(Estimator& estimator, const Draft& draft, Tokens came, Viewpoint& view) {
  int accepted = 0;
  bool foreseen = true;
  auto prediction = draft.predictions.begin();
  for (std::size_t i = 0; i < came.size(); ++i) {
    const bool drafted = i < draft.tokens.size();
    const bool estimated = prediction != draft.predictions.end() && prediction->position == i;
    if (!foreseen || !(drafted || estimated)) {
      view.run = 0;
      break;
    }
    foreseen = came[i] == (drafted ? draft.tokens[i] : prediction->token());
    if (estimated) {
      for (int c = 0; c < prediction->features.size; ++c) {
        estimator.learn(prediction->features, c, prediction->probabilities[c], prediction->tokens[c] == came[i]);
      }
      estimator.saw_best(prediction->probabilities[prediction->best], prediction->token() == came[i]);
      ++prediction;
    }
    view.run = foreseen ? view.run + 1 : 0;
    accepted += foreseen && drafted;
  }
  estimator.saw_step(accepted + 1, draft.tokens.size());
  return accepted;
}

}  // namespace histospec
