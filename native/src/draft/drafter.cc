#include "draft/drafter.h"

#include <algorithm>

namespace histospec {
namespace {

// A drafted token must promise a little more than its cost would yield otherwise, because the estimates of later
// positions assume that the earlier ones are accepted.
constexpr float kMargin = 1.1f;

// Skip the lookup if even a token of this probability would end the draft. Most last tokens are less probable, and the
// rest add little more than they cost.
constexpr float kHopeful = 0.7f;

// With a match of this length in the history, skip the namespace source, which costs the most and would not help.
constexpr int kSureOrder = 6;

// A candidate with less than this share of the best candidate's votes is not estimated.
constexpr float kUnlikelyShare = 0.1f;

// A twin that is right this often drafts alone, because evidence would cost more than it adds.
constexpr float kSure = 0.8f;

// The weight of the policy's probabilities at the matches against the estimate; and the least probability of an
// alternative that becomes a candidate.
constexpr float kTrust = 0.7f;
constexpr float kLeastAlternative = 0.03f;

// The log-odds of the shares of a token that followed no match.
constexpr std::array<float, 2> kNoShares = {-5, -5};

// Upper bounds of the speed-up that the drafter assumes, without and with a twin.
constexpr float kMostSpeedUp = 4, kMostOfTwins = 32;

// The token to draft at one position.
struct Choice {
  Token token = -1;  // none
  float probability = 0;
  Origin origin = {};
};

// The first of the most probable candidates.
std::uint8_t best_of(const std::array<float, kMaxCandidates>& probabilities, std::size_t size) {
  return static_cast<std::uint8_t>(std::max_element(probabilities.begin(), probabilities.begin() + size) -
                                   probabilities.begin());
}

// Replaces the choice by the best candidate of the evidence if that is more probable.
void weigh(DraftContext& context, const LiveSource& live, const Estimator& estimator, Draft& draft, Choice& choice) {
  const Evidence evidence = gather(context, live);
  if (evidence.candidates().empty()) return;
  Prediction& prediction = draft.predictions.emplace_back();
  prediction.position = draft.tokens.size();
  const float probability = predict(evidence, context, estimator, prediction);
  if (probability <= choice.probability) return;
  choice = {prediction.token(), probability, {kHistory, 0}};
  if (prediction.best >= evidence.candidates().size()) return;  // an alternative that followed no match
  const Match best = evidence[evidence.candidates()[prediction.best]].best;
  const std::uint8_t age = best.source() == kHistory ? context.history_source.age(best, context.newest) : 0;
  choice.origin = {best.source(), age};
}

}  // namespace

int DraftContext::catch_up() {
  history_source.catch_up(tail.tokens());
  const int depth = history_source.depth();
  if (depth < kSureOrder) namespace_source.catch_up(tail.tokens());
  return depth;
}

void DraftContext::synchronise() {
  const Tokens said = tail.tokens();
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

Evidence gather(DraftContext& context, const LiveSource& live) {
  Evidence evidence;
  const Tokens tail = context.tail.tokens();
  const int depth = context.catch_up();
  context.history_source.collect_matches(kHistory, context.generated, evidence);
  if (depth < kSureOrder || !evidence.unanimous()) live.collect_matches(tail, evidence);
  if (depth < kSureOrder) context.namespace_source.collect_matches(kNamespace, context.generated, evidence);
  evidence.pick_candidates(kUnlikelyShare);
  return evidence;
}

void describe(const Prediction& prediction, Foresight::Inputs& inputs) {
  const auto matched = static_cast<std::size_t>(prediction.features.size);
  std::array<std::array<float, 2>, kMaxCandidates> shares;
  for (std::size_t c = 0; c < prediction.size; ++c) {
    shares[c] = c < matched ? Estimator::shares(prediction.features, c) : kNoShares;
  }
  Foresight::describe({prediction.weighed.data(), prediction.size}, prediction.noise, {shares.data(), prediction.size},
                      inputs);
}

// Weighs the estimates with the policy's probabilities at the matches, and adds its alternatives as candidates.
void weigh_alternatives(const DraftContext& context, Prediction& prediction) {
  std::copy_n(prediction.probabilities.begin(), prediction.size, prediction.weighed.begin());
  Likelihood likelihood;
  context.history_source.weigh_matches(context.newest, likelihood);
  if (likelihood.empty()) return;
  const std::size_t matched = prediction.size;
  for (std::size_t c = 0; c < matched; ++c) {
    prediction.weighed[c] += kTrust * (likelihood.of(prediction.tokens[c]) - prediction.weighed[c]);
  }
  const auto end = prediction.tokens.begin() + static_cast<std::ptrdiff_t>(matched);
  for (const Token token : likelihood.tokens()) {
    const float probability = kTrust * likelihood.of(token);
    if (probability < kLeastAlternative || std::find(prediction.tokens.begin(), end, token) != end) continue;
    std::size_t at = prediction.size;
    if (at < kMaxCandidates) {
      ++prediction.size;
    } else if (--at < matched || prediction.weighed[at] >= probability) {
      continue;
    }
    for (; at > matched && prediction.weighed[at - 1] < probability; --at) {
      prediction.tokens[at] = prediction.tokens[at - 1];
      prediction.weighed[at] = prediction.weighed[at - 1];
    }
    prediction.tokens[at] = token;
    prediction.weighed[at] = probability;
  }
}

float predict(const Evidence& evidence, const DraftContext& context, const Estimator& estimator,
              Prediction& prediction) {
  const Tokens tail = context.tail.tokens();
  Estimator::describe(evidence, tail.empty() ? -1 : tail.back(), context.run, prediction.features);
  estimator.estimate(prediction.features, prediction.probabilities);
  prediction.size = static_cast<std::uint8_t>(prediction.features.size);
  for (std::size_t c = 0; c < prediction.size; ++c) prediction.tokens[c] = evidence[evidence.candidates()[c]].token;
  prediction.best = best_of(prediction.probabilities, prediction.size);
  const float alone = prediction.probabilities[prediction.best];
  prediction.foreseen = context.places.known() && alone < Foresight::kSureAlone;
  if (!prediction.foreseen) return estimator.calibrated(alone);
  weigh_alternatives(context, prediction);
  const std::size_t size = prediction.size;
  gumbel_noise(context.places.seed(), context.places.next(), {prediction.tokens.data(), size}, prediction.noise);
  Foresight::Inputs inputs;
  describe(prediction, inputs);
  estimator.foresight.estimate(prediction.features.rows, inputs, {prediction.with_noise.data(), size});
  if (!estimator.foresight.trusted()) return estimator.calibrated(alone);
  prediction.best = best_of(prediction.with_noise, size);
  return estimator.foresight.calibrated(prediction.with_noise[prediction.best]);
}

void learn(Estimator& estimator, const Prediction& prediction, Token came) {
  const std::size_t size = prediction.size, matched = static_cast<std::size_t>(prediction.features.size);
  const std::span<const Token> tokens{prediction.tokens.data(), size};
  const auto right = static_cast<std::size_t>(std::ranges::find(tokens, came) - tokens.begin());
  for (std::size_t c = 0; c < matched; ++c) {
    estimator.learn(prediction.features, static_cast<int>(c), prediction.probabilities[c], c == right);
  }
  std::size_t alone = prediction.best;  // the best without the noise
  if (prediction.foreseen) {
    if (estimator.foresight.wants_to_learn()) {
      Foresight::Inputs inputs;
      describe(prediction, inputs);
      estimator.foresight.learn(prediction.features.rows, inputs, {prediction.with_noise.data(), size}, right);
    }
    const std::size_t with_noise = best_of(prediction.with_noise, size);
    alone = best_of(prediction.probabilities, matched);
    estimator.foresight.saw_best(prediction.with_noise[with_noise], with_noise == right);
    if (with_noise != alone) estimator.foresight.compare(with_noise == right, alone == right);
  }
  estimator.saw_best(prediction.probabilities[alone], alone == right);
}

bool twin_alone(const DraftContext& context, const TwinTrust& trust) {
  return context.next_of_twin() && trust.of(context.agreement) >= kSure;
}

void draft(DraftContext& context, const LiveSource& live, const Estimator& estimator, const TwinTrust& trust,
           DraftLimits limits, Draft& draft) {
  draft.clear();
  const float speed_up = estimator.speed_up(
      limits.verify_cost, context.twin.empty() && !context.places.known() ? kMostSpeedUp : kMostOfTwins);
  const float least = limits.verify_cost * kMargin * speed_up;
  float survival = 1.0f;
  for (int drafted = 0; drafted < limits.max_tokens; ++drafted) {
    Choice choice;
    if (const Token* twin = context.next_of_twin()) choice = {*twin, trust.of(context.agreement), {kTwin, 0}};
    if (choice.probability < kSure) {
      if (drafted > 0 && survival * std::max(kHopeful, choice.probability) < least) break;
      weigh(context, live, estimator, draft, choice);
      context.history_source.mark(draft.history_trail, draft.tokens.size());
      context.namespace_source.mark(draft.namespace_trail, draft.tokens.size());
    }
    if (choice.token < 0) break;

    survival *= choice.probability;
    if (survival < least) break;
    draft.tokens.push_back(choice.token);
    draft.probabilities.push_back(choice.probability);
    draft.origins.push_back(choice.origin);
    context.push(choice.token);
    context.history_source.advance(1);
    context.namespace_source.advance(1);
    ++context.run;
  }
}

int learn(Estimator& estimator, const Draft& draft, Tokens came, DraftContext& context) {
  int accepted = 0;
  bool foreseen = true;
  auto prediction = draft.predictions.begin();
  for (std::size_t i = 0; i < came.size(); ++i) {
    const bool drafted = i < draft.tokens.size();
    const bool estimated = prediction != draft.predictions.end() && prediction->position == i;
    if (!foreseen || !(drafted || estimated)) {
      context.run = 0;
      break;
    }
    foreseen = came[i] == (drafted ? draft.tokens[i] : prediction->token());
    if (estimated) {
      learn(estimator, *prediction, came[i]);
      ++prediction;
    }
    context.run = foreseen ? context.run + 1 : 0;
    accepted += foreseen && drafted;
  }
  return accepted;
}

}  // namespace histospec
