#include "draft/foresight.h"

#include <algorithm>
#include <cmath>

#include "draft/foresight_weights.h"

namespace histospec {
namespace {

constexpr float kForesightRate = 0.002f;
constexpr float kMostMargin = 5;
// The sum of a missing candidate, and the least probability of other tokens.
constexpr float kNothing = -30, kLeastOthers = 0.02f;

// The largest two of four numbers, and where they stand.
struct Two {
  std::size_t first, second;
};
Two largest(const Foresight::PerCandidate& x) {
  const std::size_t a = x[1] > x[0], b = 2 + (x[3] > x[2]);  // the larger of each pair
  const bool swapped = x[b] > x[a];
  const std::size_t first = swapped ? b : a, loser = swapped ? a : b, partner = first ^ 1;
  return {first, x[partner] > x[loser] ? partner : loser};
}

float within_margin(float x) { return std::clamp(x, -kMostMargin, kMostMargin); }

// x / (1 + |x|)
Eight::Half bent(const Eight::Half& x) {
  return x / (1.0f + reinterpret_cast<Eight::Half>(reinterpret_cast<Eight::Bits>(x) & 0x7fffffff));
}

// 1 / (1 + e^-x) within 0.00001, for |x| up to 80.
Eight::Half sigmoid(const Eight::Half& x) {
  const Eight::Half power = 127.0f - 1.4426950f * x;  // e^-x = 2^(power - 127)
  const Eight::Bits whole = __builtin_convertvector(power, Eight::Bits);
  const Eight::Half f = power - __builtin_convertvector(whole, Eight::Half);
  const Eight::Half root =
      1.0f + (0.6931472f + (0.2402265f + (0.0555041f + (0.0096181f + 0.0013334f * f) * f) * f) * f) * f;  // 2^f
  return 1.0f / (1.0f + reinterpret_cast<Eight::Half>(whole << 23) * root);
}

}  // namespace

const Foresight::Weights& Foresight::starting() {
  static const Weights weights = Weights::of(kForesightWeights);
  return weights;
}

void Foresight::describe(std::size_t candidates, const PerCandidate& probabilities, const PerCandidate& noise,
                         const std::array<std::array<float, 2>, kMaxCandidates>& shares, Contenders& contenders) {
  constexpr float kLn2 = 0.6931472f, kLeast = 1e-4f;
  static_assert(kMaxCandidates == 4);  // a Half has one number per candidate
  PerCandidate chances, alone, sums;
  float others = 1;
  for (std::size_t c = 0; c < kMaxCandidates; ++c) {
    others -= probabilities[c];
    chances[c] = std::clamp(probabilities[c], kLeast, 1 - kLeast);
  }
  const Eight::Half logs = kLn2 * log2(Eight::Half{chances[0], chances[1], chances[2], chances[3]});
  for (std::size_t c = 0; c < kMaxCandidates; ++c) {
    alone[c] = c < candidates ? logs[c] : kNothing;
    sums[c] = c < candidates ? logs[c] + noise[c] : kNothing;
  }
  const auto [first, second] = largest(sums);
  const auto [probable, less] = largest(alone);
  const Eight::Half against =
      kLn2 * log2(Eight::Half{1 - chances[first], 1 - chances[second], std::max(others, kLeastOthers), 1});
  const float margin = within_margin(sums[first] - sums[second]);
  const float over[] = {within_margin(sums[first] - against[2]), within_margin(sums[second] - against[2])};
  const Eight::Half bent_over = bent(Eight::Half{over[0], over[1], over[0] - 1, over[1] - 1});
  const float bent_margin = margin / (1 + std::abs(margin));
  contenders.size = std::min<std::size_t>(candidates, 2);
  contenders.candidates = {first, second};
  for (std::size_t i = 0; i < 2; ++i) {
    const std::size_t c = contenders.candidates[i];
    const float sign = i == 0 ? 1 : -1;
    contenders.inputs[i] = {logs[c] - against[i],
                            within_margin(alone[c] - alone[c == probable ? less : probable]),
                            sign * margin,
                            sign * bent_margin,
                            over[i],
                            bent_over[i],
                            bent_over[2 + i],
                            noise[c],
                            shares[c][0],
                            shares[c][1]};
  }
}

void Foresight::estimate(std::span<const std::uint8_t> rows, Contenders& contenders) const {
  const auto position = weights_.at(rows);
  Eight::Half odds{};
  for (std::size_t i = 0; i < contenders.size; ++i) {
    odds[i] = std::clamp(weights_.log_odds(position, contenders.inputs[i]), -12.0f, 12.0f);
  }
  const Eight::Half all = sigmoid(odds);
  contenders.probabilities = {all[0], all[1]};
}

void Foresight::learn(std::span<const std::uint8_t> rows, const Contenders& contenders, std::size_t right) {
  for (std::size_t i = 0; i < contenders.size; ++i) {
    const float came = contenders.candidates[i] == right ? 1.0f : 0.0f;
    weights_.learn(rows, contenders.inputs[i], kForesightRate * (came - contenders.probabilities[i]));
  }
}

}  // namespace histospec
