// Properties of any foresight, independent of its weights.
#include "draft/foresight.h"

#include <cmath>

#include "draft/estimator.h"
#include "random_text.h"
#include "test.h"

using namespace histospec;
using testing::Random;

namespace {

constexpr std::array<std::uint8_t, Estimator::kContexts> kRows = {8, kLevels, 2 * kLevels, 3 * kLevels,
                                                                  Estimator::kTrainedSources * kLevels + 3};

using Shares = std::array<std::array<float, 2>, kMaxCandidates>;

struct Seen {
  Foresight::Inputs inputs;
  Foresight::PerCandidate probabilities{};
};

Seen seen(const Foresight& foresight, std::span<const float> probabilities, const Foresight::PerCandidate& noise) {
  Seen result;
  Shares shares;
  for (std::size_t c = 0; c < probabilities.size(); ++c) {
    shares[c].fill(std::log(probabilities[c] / (1 - probabilities[c])));
  }
  Foresight::describe(probabilities, noise, {shares.data(), probabilities.size()}, result.inputs);
  foresight.estimate(kRows, result.inputs, {result.probabilities.data(), probabilities.size()});
  return result;
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
    const Seen found = seen(foresight, {probabilities.data(), size}, noise);
    for (std::size_t c = 0; c < size; ++c) {
      CHECK(found.probabilities[c] > 0);
      CHECK(found.probabilities[c] < 1);
    }
  }
}

TEST_CASE("Noise that prefers a candidate makes it more probable than noise that prefers the other") {
  const Foresight foresight;
  for (const float p : {0.2f, 0.5f, 0.8f}) {
    CAPTURE(p);
    const std::array<float, 2> both = {p, 0.95f - p};
    const float preferred = seen(foresight, both, {4, -1}).probabilities[0];
    CHECK(preferred > 2 * seen(foresight, both, {-1, 4}).probabilities[0]);
    CHECK(preferred > 0.5f);
  }
}

TEST_CASE("The order of the candidates makes no difference") {
  const Foresight foresight;
  const std::array<float, 3> forth = {0.5f, 0.3f, 0.1f}, back = {0.1f, 0.3f, 0.5f};
  const Seen a = seen(foresight, forth, {0.2f, 1.3f, -0.4f}), b = seen(foresight, back, {-0.4f, 1.3f, 0.2f});
  for (std::size_t c = 0; c < 3; ++c) CHECK(std::abs(a.probabilities[c] - b.probabilities[2 - c]) < 1e-4f);
}

TEST_CASE("Learning moves a probability towards what came") {
  Foresight foresight;
  CHECK_FALSE(foresight.learned());
  const std::array<float, 2> both = {0.6f, 0.3f};
  const float before = seen(foresight, both, {1, 0.5f}).probabilities[1];
  for (int i = 0; i < 300; ++i) {
    const Seen now = seen(foresight, both, {1, 0.5f});
    foresight.learn(kRows, now.inputs, {now.probabilities.data(), 2}, 1);
  }
  CHECK(foresight.learned());
  CHECK(seen(foresight, both, {1, 0.5f}).probabilities[1] > before + 0.2f);
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
