#include "draft/foresight.h"

#include <algorithm>

#include "draft/foresight_weights.h"

namespace histospec {
namespace {

constexpr float kForesightRate = 0.002f;
constexpr float kMostMargin = 5;
// The sum of a missing candidate, and the least probability of other tokens.
constexpr float kNothing = -30, kLeastOthers = 0.02f;

// By how much each sum is larger than the largest of the others.
Eight::Half margins(const Eight::Half& sums) {
  float first = kNothing, second = kNothing;
  for (int c = 0; c < kMaxCandidates; ++c) {
    second = std::max(second, std::min(first, sums[c]));
    first = std::max(first, sums[c]);
  }
  Eight::Half out;
  for (int c = 0; c < kMaxCandidates; ++c) {
    out[c] = std::clamp(sums[c] - (sums[c] == first ? second : first), -kMostMargin, kMostMargin);
  }
  return out;
}

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

void Foresight::describe(std::span<const float> probabilities, const PerCandidate& noise,
                         std::span<const std::array<float, 2>> shares, Inputs& inputs) {
  constexpr float kLn2 = 0.6931472f;
  static_assert(kMaxCandidates == 4);  // a Half has one number per candidate
  const auto size = static_cast<int>(probabilities.size());
  Eight chances = Eight::all(0.5f);  // of the candidates, and against them
  float others = 1;
  for (int c = 0; c < size; ++c) {
    others -= probabilities[c];
    chances.low[c] = std::clamp(probabilities[c], 1e-4f, 1 - 1e-4f);
    chances.high[c] = 1 - chances.low[c];
  }
  const Eight logs = kLn2 * log2(chances);
  const float rest = kLn2 * log2(Eight::all(std::max(others, kLeastOthers))).low[0];
  Eight::Half alone = logs.low, sums = logs.low + Eight::Half{noise[0], noise[1], noise[2], noise[3]};
  for (int c = size; c < kMaxCandidates; ++c) alone[c] = sums[c] = kNothing;
  const Eight::Half margin = margins(sums), apart = margins(alone), odds = logs.low - logs.high;
  Eight::Half over;
  for (int c = 0; c < kMaxCandidates; ++c) over[c] = std::clamp(sums[c] - rest, -kMostMargin, kMostMargin);
  const Eight::Half bent_margin = bent(margin), bent_over = bent(over), bent_later = bent(over - 1.0f);
  for (int c = 0; c < size; ++c) {
    inputs[c] = {odds[c],      apart[c],      margin[c], bent_margin[c], over[c],
                 bent_over[c], bent_later[c], noise[c],  shares[c][0],   shares[c][1]};
  }
}

void Foresight::estimate(std::span<const std::uint8_t> rows, const Inputs& inputs,
                         std::span<float> probabilities) const {
  const auto position = weights_.at(rows);
  Eight::Half odds{};
  for (std::size_t c = 0; c < probabilities.size(); ++c) {
    odds[c] = std::clamp(weights_.log_odds(position, inputs[c]), -12.0f, 12.0f);
  }
  const Eight::Half all = sigmoid(odds);
  for (std::size_t c = 0; c < probabilities.size(); ++c) probabilities[c] = all[c];
}

void Foresight::learn(std::span<const std::uint8_t> rows, const Inputs& inputs, std::span<const float> probabilities,
                      std::size_t right) {
  learned_ = true;
  for (std::size_t c = 0; c < probabilities.size(); ++c) {
    weights_.learn(rows, inputs[c], kForesightRate * ((c == right ? 1.0f : 0.0f) - probabilities[c]));
  }
}

}  // namespace histospec
