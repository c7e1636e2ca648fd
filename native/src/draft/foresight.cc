#include "draft/foresight.h"

#include <algorithm>
#include <cmath>

#include "draft/foresight_weights.h"

namespace histospec {
namespace {

constexpr float kRate = 0.002f;
constexpr float kMostMargin = 5;
// Of a position without a second candidate, and the least probability of other tokens.
constexpr float kNothing = -30, kLeastOthers = 0.02f;

// By how much each number is larger than the largest of the others.
void margins(std::span<const float> sums, std::span<float> out) {
  float first = kNothing, second = kNothing;
  for (float sum : sums) {
    second = std::max(second, std::min(first, sum));
    first = std::max(first, sum);
  }
  for (std::size_t c = 0; c < sums.size(); ++c) {
    out[c] = std::clamp(sums[c] - (sums[c] == first ? second : first), -kMostMargin, kMostMargin);
  }
}

}  // namespace

const Foresight::Weights& Foresight::starting() {
  static const Weights weights = Weights::of(kForesightWeights);
  return weights;
}

void Foresight::describe(std::span<const float> probabilities, std::span<const float, kMaxCandidates> noise,
                         Inputs& inputs) {
  constexpr float kLn2 = 0.6931472f;
  const std::size_t size = probabilities.size();
  std::array<float, 2 * kMaxCandidates> chances;  // of the candidates, and against them
  chances.fill(0.5f);
  float others = 1;
  for (std::size_t c = 0; c < size; ++c) {
    others -= probabilities[c];
    chances[c] = std::clamp(probabilities[c], 1e-4f, 1 - 1e-4f);
    chances[kMaxCandidates + c] = 1 - chances[c];
  }
  store(chances.data(), kLn2 * log2(load(chances.data())));
  const float rest = std::log(std::max(others, kLeastOthers));
  std::array<float, kMaxCandidates> sums, alone, margin;
  for (std::size_t c = 0; c < size; ++c) sums[c] = chances[c] + noise[c];
  margins({chances.data(), size}, alone);
  margins({sums.data(), size}, margin);
  const auto bent = [](float x) { return x / (1 + std::abs(x)); };
  for (std::size_t c = 0; c < size; ++c) {
    const float over = std::clamp(sums[c] - rest, -kMostMargin, kMostMargin);
    inputs[c] = {chances[c] - chances[kMaxCandidates + c],
                 alone[c],
                 margin[c],
                 bent(margin[c]),
                 over,
                 bent(over),
                 bent(over - 1),
                 noise[c]};
  }
}

void Foresight::estimate(std::span<const std::uint8_t> rows, const Inputs& inputs,
                         std::span<float> probabilities) const {
  const Weights& w = weights();
  const auto position = w.at(rows);
  for (std::size_t c = 0; c < probabilities.size(); ++c) {
    probabilities[c] = 1.0f / (1.0f + std::exp(-std::clamp(w.log_odds(position, inputs[c]), -12.0f, 12.0f)));
  }
}

void Foresight::learn(std::span<const std::uint8_t> rows, const Weights::Inputs& inputs, float probability,
                      bool right) {
  if (!learned_) learned_ = std::make_unique<Weights>(starting());
  learned_->learn(rows, inputs, kRate * ((right ? 1.0f : 0.0f) - probability));
}

}  // namespace histospec
