// Properties of any estimator, independent of its features.
#include "draft/estimator.h"

#include "random_text.h"
#include "test.h"

using namespace histospec;
using testing::Random;

namespace {

using Probabilities = std::array<float, kMaxCandidates>;

Evidence random_evidence(Random& random) {
  Evidence evidence;
  const std::size_t alphabet = random.between(1, 30);
  for (std::size_t n = random.below(60); n > 0; --n) {
    const auto name = random.one_in(6) ? Evidence::kNoToken : evidence.name(static_cast<Token>(random.below(alphabet)));
    const auto length = static_cast<std::uint8_t>(random.between(1, kMaxOrder));
    const float vote = Evidence::vote(length, static_cast<int>(random.below(8)));
    const auto source = static_cast<Source>(random.below(kSourceCount));
    evidence.note_match_length(source, length);
    evidence.add_match(name, Match(length, source), vote);
  }
  evidence.pick_candidates(0.1f);
  return evidence;
}

// The history has `agree` matches for one token, and `differ` for another.
Evidence history(int agree, int differ, std::uint8_t length) {
  Evidence evidence;
  evidence.note_match_length(kHistory, length);
  const auto add = [&](Token token, int nearness) {
    evidence.add_match(evidence.name(token), Match(length, kHistory), Evidence::vote(length, nearness));
  };
  for (int i = 0; i < agree; ++i) add(1, i);
  for (int i = 0; i < differ; ++i) add(2, i);
  evidence.pick_candidates(0.0f);
  return evidence;
}

Estimator::Features described(const Evidence& evidence, Token previous = 5, int run = 3) {
  Estimator::Features features;
  Estimator::describe(evidence, previous, run, features);
  return features;
}

float first(const Estimator& estimator, const Estimator::Features& features) {
  Probabilities p;
  estimator.estimate(features, p);
  return p[0];
}

}  // namespace

TEST_CASE("Each candidate gets a probability, the same every time") {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    const Evidence evidence = random_evidence(random);
    Estimator estimator;
    for (const bool taught : {false, true}) {
      for (int run : {0, 1, 100, 1 << 30}) {
        for (Token previous : {-1, 0, INT32_MAX}) {
          const Estimator::Features features = described(evidence, previous, run);
          CHECK_EQ(static_cast<std::size_t>(features.size), evidence.candidates().size());
          Probabilities p, again;
          estimator.estimate(features, p);
          estimator.estimate(described(evidence, previous, run), again);
          for (int c = 0; c < features.size; ++c) {
            CHECK(p[c] > 0);
            CHECK(p[c] < 1);
            CHECK_EQ(p[c], again[c]);
            if (taught) estimator.learn(features, c, p[c], random.one_in(2));
          }
        }
      }
    }
  }
}

TEST_CASE("A token on which all matches agree is more probable") {
  const Estimator estimator;
  for (std::uint8_t length : {2, 4, 12, 32}) {
    CHECK(first(estimator, described(history(8, 0, length))) > first(estimator, described(history(5, 3, length))));
  }
}

TEST_CASE("Learning moves a probability towards what came, and reset() forgets it") {
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    const Evidence evidence = random_evidence(random);
    const Estimator::Features features = described(evidence);
    if (features.size == 0) continue;
    for (const bool right : {true, false}) {
      Estimator estimator;
      const float before = first(estimator, features);
      for (int i = 0; i < 3000; ++i) estimator.learn(features, 0, first(estimator, features), right);
      const float after = first(estimator, features);
      CHECK((right ? after > std::max(before, 0.9f) : after < std::min(before, 0.1f)));
      estimator.reset();
      CHECK_EQ(first(estimator, features), before);
    }
  }
}

TEST_CASE("An estimator holds no memory before it learns") {
  const Estimator::Features features = described(history(3, 1, 5));
  Estimator estimator;
  CHECK_EQ(estimator.bytes(), 0u);
  estimator.learn(features, 0, 0.5f, true);
  const std::size_t bytes = estimator.bytes();
  CHECK(bytes > 0);
  for (int i = 0; i < 100; ++i) estimator.learn(features, i % 2, 0.5f, i % 2 == 0);
  CHECK_EQ(estimator.bytes(), bytes);
  CHECK(first(estimator, features) > first(Estimator(), features));
  estimator.reset();
  CHECK_EQ(estimator.bytes(), 0u);
}

TEST_CASE("The speed-up grows with accepted tokens, and shrinks with the cost") {
  Estimator good, bad;
  for (int i = 0; i < 5000; ++i) {
    good.saw_step(5, 5);
    bad.saw_step(1, 5);
  }
  for (float cost : {0.0f, 0.05f, 0.5f}) {
    CHECK(good.speed_up(cost, 4) > bad.speed_up(cost, 4));
    CHECK(bad.speed_up(cost, 4) >= 1);
    CHECK_EQ(good.speed_up(cost, 1.2f), 1.2f);
    CHECK(good.speed_up(cost, 4) >= good.speed_up(cost + 0.1f, 4));
  }
}
