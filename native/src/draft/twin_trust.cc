#include "draft/twin_trust.h"

#include <algorithm>
#include <bit>

namespace histospec {
namespace {

// How many tokens the starting values count as, and the most that an entry counts.
constexpr float kDoubt = 8, kMostSeen = 1000;

// Probabilities stay away from 0 and 1.
constexpr float kLeast = 0.001f, kMost = 0.999f;

}  // namespace

std::size_t TwinTrust::class_of(int streak) {
  if (streak == 0) return 0;
  return std::min<std::size_t>(std::bit_width(static_cast<unsigned>(streak - 1)) + 1, kClasses - 1);
}

void TwinTrust::learn(const Agreement& agreement, bool right) {
  const std::size_t streak = class_of(agreement.streak);
  float& probability = right_[kind_of(agreement)][streak];
  float& seen = seen_[kind_of(agreement)][streak];
  probability += ((right ? 1.0f : 0.0f) - probability) / (kDoubt + seen);
  probability = std::clamp(probability, kLeast, kMost);
  seen = std::min(seen + 1, kMostSeen);
}

}  // namespace histospec
