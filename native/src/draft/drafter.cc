#include "draft/drafter.h"

#include <algorithm>
#include <optional>

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

// Behind tokens that are accepted less often than this, the noise is not worth its time.
constexpr float kForeseen = 0.4f;

// A twin that is right this often drafts alone, because evidence would cost more than it adds.
constexpr float kSure = 0.8f;

// The weight of the policy's probabilities at a match against the estimate.
constexpr float kTrust = 0.7f;

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

// Weighs the estimates with the policy's probabilities at a match, and adds its alternatives as candidates.
void weigh_alternatives(const WeighedMatch& match, Prediction& prediction, Foresight::PerCandidate& weighed) {
  const auto add = [&](Token token, float probability) {
    bool known = false;
    for (std::size_t c = 0; c < kMaxCandidates; ++c) {
      const bool same = prediction.tokens[c] == token;
      weighed[c] += same ? kTrust * probability : 0;
      known |= same;
    }
    if (known || prediction.size == kMaxCandidates) return;
    prediction.tokens[prediction.size] = token;
    weighed[prediction.size++] = kTrust * probability;
  };
  for (float& probability : weighed) probability *= 1 - kTrust;
  add(match.next, match.probability());
  for (int i = 0; i < match.others.count(); ++i) add(match.others.token(i), match.others.probability(i));
}

// Finds the contenders of the next position, and their probabilities.
void foresee(const DraftContext& context, const std::optional<WeighedMatch>& match, const Foresight& foresight,
             Prediction& prediction) {
  const std::size_t matched = prediction.size;
  Foresight::PerCandidate weighed{}, noise;
  std::array<std::array<float, 2>, kMaxCandidates> shares;
  for (std::size_t c = 0; c < kMaxCandidates; ++c) {
    if (c < matched) weighed[c] = prediction.probabilities[c];
    shares[c] = c < matched ? Estimator::shares(prediction.features, c) : kNoShares;
  }
  if (match) weigh_alternatives(*match, prediction, weighed);
  const std::span<const Token> tokens{prediction.tokens.data(), prediction.size};
  context.noise.of(tokens, noise);
  Foresight::describe(tokens.size(), weighed, noise, shares, prediction.contenders);
  foresight.estimate(prediction.features.rows, prediction.contenders);
}

// Replaces the choice by the best candidate of the evidence if that is more probable. `survival`: the probability that
// the draft is accepted so far.
void weigh(DraftContext& context, const DraftSources& sources, const Estimator& estimator, float survival, Draft& draft,
           Choice& choice) {
  const Evidence evidence = gather(context, sources);
  if (evidence.candidates().empty()) return;
  Prediction& prediction = draft.predictions.emplace_back();
  prediction.position = draft.tokens.size();
  const float probability = predict(evidence, context, sources, estimator, survival >= kForeseen, prediction);
  if (probability <= choice.probability) return;
  // A token that followed no match is an alternative at the weighed match.
  const Match best = prediction.best < evidence.candidates().size()
                         ? evidence[evidence.candidates()[prediction.best]].best
                         : context.history_source.weighed_match(sources.history)->match;
  const std::uint8_t age =
      best.source() == kHistory ? SegmentSource::age(sources.history, best, context.newest) : std::uint8_t{0};
  choice = {prediction.token(), probability, {best.source(), age}};
}

}  // namespace

void Draft::runners_up(std::span<Token> others, std::span<float> their_probabilities) const {
  std::ranges::fill(others, -1);
  std::ranges::fill(their_probabilities, 0.0f);
  for (const Prediction& prediction : predictions) {
    const std::size_t at = prediction.position;
    if (at >= tokens.size()) break;
    for (int c = 0; c < prediction.features.size; ++c) {
      if (prediction.tokens[c] == tokens[at] || prediction.probabilities[c] <= their_probabilities[at]) continue;
      others[at] = prediction.tokens[c];
      their_probabilities[at] = prediction.probabilities[c];
    }
  }
}

int DraftContext::catch_up(const DraftSources& sources) {
  history_source.catch_up(sources.history, tail.tokens());
  const int depth = history_source.depth();
  if (depth < kSureOrder) namespace_source.catch_up(sources.namespace_, tail.tokens());
  return depth;
}

void DraftContext::synchronise(Tokens twin) {
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

Evidence gather(DraftContext& context, const DraftSources& sources) {
  Evidence evidence;
  const Tokens tail = context.tail.tokens();
  const int depth = context.catch_up(sources);
  context.history_source.collect_matches(sources.history, kHistory, context.generated, evidence);
  if (depth < kSureOrder || !evidence.unanimous()) sources.live.collect_matches(tail, evidence);
  if (depth < kSureOrder) {
    context.namespace_source.collect_matches(sources.namespace_, kNamespace, context.generated, evidence);
  }
  evidence.pick_candidates(kUnlikelyShare);
  return evidence;
}

float predict(const Evidence& evidence, const DraftContext& context, const DraftSources& sources,
              const Estimator& estimator, bool foresees, Prediction& prediction) {
  const Tokens tail = context.tail.tokens();
  Estimator::describe(evidence, tail.empty() ? -1 : tail.back(), context.run, prediction.features);
  estimator.estimate(prediction.features, prediction.probabilities);
  prediction.size = static_cast<std::uint8_t>(prediction.features.size);
  prediction.tokens.fill(-1);  // no token
  for (std::size_t c = 0; c < prediction.size; ++c) prediction.tokens[c] = evidence[evidence.candidates()[c]].token;
  prediction.best = prediction.alone = best_of(prediction.probabilities, prediction.size);
  const float alone = prediction.probabilities[prediction.alone];
  prediction.foreseen = false;
  if (!foresees || !context.noise.known() || alone >= Foresight::kSureAlone) return estimator.calibrated(alone);
  const std::optional<WeighedMatch> match = context.history_source.weighed_match(sources.history);
  if (match && match->next == prediction.token() && match->probability() >= Foresight::kSureAlone) {
    return estimator.calibrated(alone + kTrust * (match->probability() - alone));
  }
  prediction.foreseen = true;
  foresee(context, match, estimator.foresight, prediction);
  if (!estimator.foresight.trusted()) return estimator.calibrated(alone);
  const Foresight::Contenders& contenders = prediction.contenders;
  prediction.best = static_cast<std::uint8_t>(contenders.candidates[contenders.best()]);
  return estimator.foresight.calibrated(contenders.probabilities[contenders.best()]);
}

void learn(Estimator& estimator, const Prediction& prediction, Token came) {
  const std::span<const Token> tokens{prediction.tokens.data(), prediction.size};
  const auto right = static_cast<std::size_t>(std::ranges::find(tokens, came) - tokens.begin());
  for (int c = 0; c < prediction.features.size; ++c) {
    estimator.learn(prediction.features, c, prediction.probabilities[c], static_cast<std::size_t>(c) == right);
  }
  const bool alone = prediction.alone == right;
  if (prediction.foreseen) {
    const Foresight::Contenders& contenders = prediction.contenders;
    if (estimator.foresight.wants_to_learn()) estimator.foresight.learn(prediction.features.rows, contenders, right);
    const std::size_t best = contenders.candidates[contenders.best()];
    estimator.foresight.saw_best(contenders.probabilities[contenders.best()], best == right);
    if (best != prediction.alone) estimator.foresight.compare(best == right, alone);
  }
  estimator.saw_best(prediction.probabilities[prediction.alone], alone);
}

bool twin_alone(const DraftContext& context, Tokens twin, const TwinTrust& trust) {
  return context.next_of(twin) && trust.of(context.agreement) >= kSure;
}

void draft(DraftContext& context, const DraftSources& sources, const Estimator& estimator, const TwinTrust& trust,
           DraftLimits limits, Draft& draft) {
  draft.clear();
  const float speed_up = estimator.speed_up(
      limits.verify_cost, sources.twin.empty() && !context.noise.known() ? kMostSpeedUp : kMostOfTwins);
  const float least = limits.verify_cost * kMargin * speed_up;
  float survival = 1.0f;
  for (int drafted = 0; drafted < limits.max_tokens; ++drafted) {
    Choice choice;
    if (const Token* twin = context.next_of(sources.twin)) choice = {*twin, trust.of(context.agreement), {kTwin, 0}};
    if (choice.probability < kSure) {
      if (drafted > 0 && survival * std::max(kHopeful, choice.probability) < least) break;
      weigh(context, sources, estimator, survival, draft, choice);
      context.history_source.mark(draft.history_trail, draft.tokens.size());
      context.namespace_source.mark(draft.namespace_trail, draft.tokens.size());
    }
    if (choice.token < 0) break;

    survival *= choice.probability;
    if (survival < least) break;
    draft.tokens.push_back(choice.token);
    draft.probabilities.push_back(choice.probability);
    draft.origins.push_back(choice.origin);
    context.push(choice.token, sources.twin);
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
