#include "estimator.h"

#include <algorithm>
#include <cmath>

namespace histospec {
namespace {

constexpr float kRate = 0.01f;
constexpr float kStep = 0.125f;  // of a stored prediction
constexpr int kLiveClasses = 4;  // of the longest match in live text, three orders each
constexpr int kBuckets = (kOrderCount + 1) * kLiveClasses * kLiveClasses * kLiveClasses;

constexpr int kAligned = kSourceCount * kOrderCount;
constexpr int kBias = kAligned + 1;
constexpr int kLogCount = kAligned + 2;
constexpr int kLongest = kAligned + 3;

// log(n + 0.3), tabulated where almost all counts are.
float log_count(std::uint32_t n) {
  static const std::array<float, 1024> table = [] {
    std::array<float, 1024> t;
    for (std::size_t i = 0; i < t.size(); ++i) t[i] = std::log(static_cast<float>(i) + 0.3f);
    return t;
  }();
  return n < table.size() ? table[n] : std::log(static_cast<float>(n) + 0.3f);
}

// The log-odds of a candidate seen `count` times out of `total`.
float stretch(std::uint32_t count, std::uint32_t total) { return log_count(count) - log_count(total - count); }

std::int8_t quantise(float x) {
  return static_cast<std::int8_t>(std::clamp(std::nearbyint(x / kStep), -127.0f, 127.0f));
}

}  // namespace

const Estimator::Weights& Estimator::initial() {
  static const Weights weights = [] {
    Weights w;
    w.fill(0.08f);
    std::fill(w.begin() + kHistory * kOrderCount, w.begin() + (kHistory + 1) * kOrderCount, 0.15f);
    std::fill(w.begin() + kAligned, w.end(), 0.0f);
    return w;
  }();
  return weights;
}

Estimator::Features Estimator::features(const Evidence& evidence, int candidate) {
  Features f{};
  std::array<int, kSourceCount> matched;
  for (int source = 0; source < kSourceCount; ++source) {
    const Counts& counts = evidence.counts[source];
    matched[source] = counts.matched();
    for (int a = 0; a < matched[source]; ++a) {
      f.x[source * kOrderCount + a] = quantise(stretch(counts.of[a][candidate], counts.total[a]));
    }
  }
  if (evidence.aligned_total > 0) {
    f.x[kAligned] = quantise(stretch(evidence.aligned[candidate], evidence.aligned_total));
  }
  f.x[kBias] = quantise(1.0f);
  const int longest = matched[kHistory];
  if (longest > 0) f.x[kLogCount] = quantise(log_count(evidence.counts[kHistory].total[longest - 1]));
  f.x[kLongest] = quantise(static_cast<float>(longest) * 0.2f);
  const auto live = [](int orders) { return std::min(orders / 3, kLiveClasses - 1); };
  f.bucket = static_cast<std::uint16_t>(
      ((longest * kLiveClasses + live(matched[kOwn])) * kLiveClasses + live(matched[kSiblings])) * kLiveClasses +
      live(matched[kNamespace]));
  return f;
}

float Estimator::probability(const Features& features) const {
  const Weights& w = weights(features.bucket);
  float sum = 0;
  for (int i = 0; i < kFeatures; ++i) sum += w[i] * static_cast<float>(features.x[i]);
  return 1.0f / (1.0f + std::exp(-std::clamp(sum * kStep, -12.0f, 12.0f)));
}

void Estimator::learn(const Features& features, float probability, bool right) {
  if (weights_.empty()) weights_.assign(kBuckets, initial());
  Weights& w = weights_[features.bucket];
  const float step = kRate * kStep * ((right ? 1.0f : 0.0f) - probability);
  for (int i = 0; i < kFeatures; ++i) w[i] += step * static_cast<float>(features.x[i]);
}

}  // namespace histospec
