// A correction of probabilities: the best of several candidates is right a little more or less often than estimated.
// It learns the difference for each tenth of the probability.
#pragma once

#include <algorithm>
#include <array>

namespace histospec {

struct Correction {
  static constexpr int kTenths = 10;
  // Observations with which the correction of a tenth starts, and the most that it counts.
  static constexpr float kDoubt = 100, kMostSeen = 2000;

  static int tenth(float probability) { return std::min(static_cast<int>(probability * kTenths), kTenths - 1); }
  float corrected(float probability) const {
    return std::clamp(probability + offset[tenth(probability)], 1e-6f, 1 - 1e-6f);
  }
  void saw(float probability, bool right) {
    const int at = tenth(probability);
    const float error = (right ? 1.0f : 0.0f) - corrected(probability);
    offset[at] += error / (kDoubt + seen[at]);
    seen[at] = std::min(seen[at] + 1, kMostSeen);
  }

  // Whether numbers that were read make sense.
  bool valid() const {
    return std::ranges::all_of(seen, [](float n) { return n >= 0; });
  }

  std::array<float, kTenths> offset{};
  std::array<float, kTenths> seen{};
};

}  // namespace histospec
