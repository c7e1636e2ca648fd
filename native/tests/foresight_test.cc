// Properties of any foresight, independent of its weights.
#include "draft/foresight.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>
#include <vector>

#include "draft/estimator.h"
#include "random_text.h"
#include "test.h"

using namespace histospec;
using testing::Random;

namespace {

constexpr std::array<std::uint8_t, Estimator::kContexts> kRows = {8, kLevels, 2 * kLevels, 3 * kLevels,
                                                                  Estimator::kTrainedSources * kLevels + 3};

Foresight::Contenders seen(const Foresight& foresight, std::span<const float> probabilities,
                           const Foresight::PerCandidate& noise) {
  Foresight::PerCandidate all{};
  std::array<std::array<float, 2>, kMaxCandidates> shares{};
  for (std::size_t c = 0; c < probabilities.size(); ++c) {
    all[c] = probabilities[c];
    shares[c].fill(std::log(probabilities[c] / (1 - probabilities[c])));
  }
  Foresight::Contenders contenders;
  Foresight::describe(probabilities.size(), all, noise, shares, contenders);
  foresight.estimate(kRows, contenders);
  return contenders;
}

// The probability of a candidate, which must be a contender.
float probability_of(const Foresight::Contenders& contenders, std::size_t candidate) {
  for (std::size_t i = 0; i < contenders.size; ++i) {
    if (contenders.candidates[i] == candidate) return contenders.probabilities[i];
  }
  FAIL("no contender");
  return 0;
}

}  // namespace

TEST_CASE("Any noise gives probabilities") {
  const Foresight foresight;
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    const auto any = [&](float least, float most) {
      return least + (most - least) * static_cast<float>(random.below(1001)) / 1000;
    };
    std::array<float, kMaxCandidates> probabilities{};
    Foresight::PerCandidate noise{};
    const std::size_t size = random.between(1, kMaxCandidates);
    for (std::size_t c = 0; c < size; ++c) {
      probabilities[c] = any(1e-5f, 1 - 1e-5f);
      noise[c] = any(-3.3f, 23);
    }
    const Foresight::Contenders found = seen(foresight, {probabilities.data(), size}, noise);
    CHECK_EQ(found.size, std::min<std::size_t>(size, 2));
    for (std::size_t i = 0; i < found.size; ++i) {
      CHECK(found.probabilities[i] > 0);
      CHECK(found.probabilities[i] < 1);
    }
  }
}

TEST_CASE("The contenders have the two largest sums, whatever the order") {
  const Foresight foresight;
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    const std::size_t size = random.between(1, kMaxCandidates);
    std::vector<float> probabilities(size);
    Foresight::PerCandidate noise{};
    std::vector<std::pair<float, std::size_t>> sums;
    for (std::size_t c = 0; c < size; ++c) {
      probabilities[c] = 0.01f + 0.24f * static_cast<float>(random.below(1001)) / 1000;
      noise[c] = -3 + 10 * static_cast<float>(random.below(100001)) / 100000;
      sums.emplace_back(std::log(probabilities[c]) + noise[c], c);
    }
    std::ranges::sort(sums, std::greater());
    const Foresight::Contenders found = seen(foresight, probabilities, noise);
    for (std::size_t i = 0; i < found.size; ++i) {
      const float sum = std::log(probabilities[found.candidates[i]]) + noise[found.candidates[i]];
      CHECK(std::abs(sum - sums[i].first) < 1e-3);  // the engine's logarithm is within 0.0002
    }
    CHECK((found.size == 1 || found.candidates[0] != found.candidates[1]));
  }
}

TEST_CASE("Noise that prefers a candidate makes it more probable than noise that prefers the other") {
  const Foresight foresight;
  for (const float p : {0.2f, 0.5f, 0.8f}) {
    CAPTURE(p);
    const std::array<float, 2> both = {p, 0.95f - p};
    const float preferred = probability_of(seen(foresight, both, {4, -1}), 0);
    CHECK(preferred > 2 * probability_of(seen(foresight, both, {-1, 4}), 0));
    CHECK(preferred > 0.5f);
  }
}

TEST_CASE("The order of the candidates makes no difference") {
  const Foresight foresight;
  const std::array<float, 3> forth = {0.5f, 0.3f, 0.1f}, back = {0.1f, 0.3f, 0.5f};
  const auto a = seen(foresight, forth, {0.2f, 1.3f, -0.4f}), b = seen(foresight, back, {-0.4f, 1.3f, 0.2f});
  for (std::size_t i = 0; i < 2; ++i) {
    CHECK_EQ(a.candidates[i], 2 - b.candidates[i]);
    CHECK(std::abs(a.probabilities[i] - b.probabilities[i]) < 1e-4f);
  }
}

TEST_CASE("Learning moves a probability towards what came") {
  Foresight foresight;
  const std::array<float, 2> both = {0.6f, 0.3f};
  const float before = probability_of(seen(foresight, both, {1, 0.5f}), 1);
  for (int i = 0; i < 300; ++i) {
    foresight.learn(kRows, seen(foresight, both, {1, 0.5f}), 1);
  }
  CHECK(probability_of(seen(foresight, both, {1, 0.5f}), 1) > before + 0.2f);
}

TEST_CASE("Drafts follow the noise until it misleads more often than it corrects") {
  Foresight foresight;
  for (int i = 0; i < 1000; ++i) {
    foresight.compare(true, false);
    foresight.compare(false, false);
  }
  CHECK(foresight.trusted());
  for (int i = 0; i < 30; ++i) foresight.compare(false, true);
  CHECK_FALSE(foresight.trusted());
  for (int i = 0; i < 30; ++i) foresight.compare(true, false);
  CHECK(foresight.trusted());
}
