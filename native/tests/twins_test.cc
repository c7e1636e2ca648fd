// Unit tests of twins and of the trust in them.
#include "draft/twins.h"

#include <cmath>
#include <optional>
#include <set>

#include "draft/twins.h"
#include "random_text.h"
#include "test.h"

using namespace histospec;
using testing::Random;

namespace {

std::shared_ptr<const Twin> text(std::vector<Token> tokens) { return std::make_shared<const Twin>(std::move(tokens)); }

// What was added, in order, and the rules said naively.
struct Reference {
  struct Added {
    Twins::Key key;
    std::int64_t epoch;
    Token token;
  };
  std::vector<Added> added;

  std::optional<Token> find(Twins::Key key) const {
    std::set<std::int64_t> epochs;
    for (const Added& a : added) epochs.insert(a.epoch);
    while (epochs.size() > 2) epochs.erase(epochs.begin());
    const Added* newest = nullptr;
    for (const Added& a : added) {
      if (a.key == key && epochs.contains(a.epoch) && (!newest || a.epoch >= newest->epoch)) newest = &a;
    }
    if (!newest) return {};
    return newest->token;
  }
};

}  // namespace

TEST_CASE("A response is a twin up to its first turn that was not generated") {
  const std::vector<Token> tokens = {5, 6, 7, 8};
  const std::vector<std::uint8_t> late = {1, 1, 0, 1}, early = {0, 1, 1, 1}, never = {1, 1, 1, 1};
  CHECK(!Twins::of({{}, tokens, {}, 1}));
  CHECK_EQ(*Twins::of({{}, tokens, {}, 1, 0}), tokens);
  CHECK_EQ(*Twins::of({{}, tokens, never, 1, -3}), tokens);
  CHECK_EQ(*Twins::of({{}, tokens, late, 1, 3}), (std::vector<Token>{5, 6}));
  CHECK(!Twins::of({{}, tokens, early, 1, 3}));
  CHECK(!Twins::of({{}, {}, {}, 1, 3}));
}

TEST_CASE("The twin of a seed is its newest response in the newest epochs") {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    Random random(seed);
    Twins twins;
    Reference reference;
    const std::size_t nothing = twins.bytes();
    for (Token token = 0; token < 60; ++token) {
      CAPTURE(seed);
      CAPTURE(token);
      const Twins::Key key = {static_cast<std::int64_t>(random.below(5)) - 2, random.below(2)};
      const auto epoch = static_cast<std::int64_t>(token / 12 + random.below(4));
      twins.add(key, epoch, text({token}));
      reference.added.push_back({key, epoch, token});
      twins.check_integrity();
      CHECK(twins.bytes() > nothing);
      for (std::int64_t s = -2; s <= 3; ++s) {
        for (std::size_t start : {0, 1}) {
          const auto held = twins.find({s, start});
          const auto expected = reference.find({s, start});
          CHECK_EQ(held != nullptr, expected.has_value());
          if (held) CHECK_EQ(held->front(), *expected);
        }
      }
    }
  }
}

TEST_CASE("A twin that was replaced is not counted in bytes()") {
  Twins twins;
  twins.add({1, 0}, 1, text(std::vector<Token>(1000)));
  const std::size_t one = twins.bytes();
  CHECK(one > 1000 * sizeof(Token));
  twins.add({1, 0}, 1, text(std::vector<Token>(1000)));
  twins.add({1, 0}, 2, text(std::vector<Token>(1000)));
  CHECK_EQ(twins.bytes(), one);
  twins.add({2, 0}, 3, text({7}));
  twins.add({2, 0}, 4, text({7}));
  CHECK(twins.bytes() < 1000);
}

TEST_CASE("Trust grows with agreement") {
  const TwinTrust trust;
  for (bool faithful : {false, true}) {
    float last = 0;
    for (int streak = 0; streak < 200; ++streak) {
      const float probability = trust.of({streak, faithful});
      CHECK(probability > 0);
      CHECK(probability < 1);
      CHECK(probability >= last);
      last = probability;
    }
    CHECK(trust.of({5, true}) >= trust.of({5, false}));
  }
}

TEST_CASE("A streak ends at the first difference") {
  Agreement agreement;
  agreement.saw(true);
  agreement.saw(true);
  CHECK(agreement.streak == 2);
  CHECK(agreement.faithful);
  agreement.saw(false);
  CHECK(agreement.streak == 0);
  CHECK(!agreement.faithful);
  agreement.saw(true);
  CHECK(agreement.streak == 1);
  CHECK(!agreement.faithful);
}

// It follows the truth when that changes.
TEST_CASE("Trust learns how often twins are right, each class by itself") {
  Random random(1);
  TwinTrust trust;
  const TwinTrust before;
  const Agreement taught = {20, false};
  for (const double truth : {0.99, 0.2, 0.7}) {
    for (int i = 0; i < 10000; ++i) trust.learn(taught, static_cast<double>(random.below(1000)) < 1000 * truth);
    CHECK(std::abs(trust.of(taught) - truth) < 0.06);
  }
  CHECK_EQ(trust.of(taught), trust.of({17, false}));
  CHECK_EQ(trust.of(taught), trust.of({32, false}));
  for (const Agreement& other :
       {Agreement{16, false}, Agreement{33, false}, Agreement{20, true}, Agreement{0, false}}) {
    CHECK_EQ(trust.of(other), before.of(other));
  }
}

TEST_CASE("Trust never becomes certainty") {
  TwinTrust trust;
  for (int i = 0; i < 100000; ++i) {
    trust.learn({100, true}, true);
    trust.learn({0, false}, false);
  }
  CHECK(trust.of({100, true}) > 0.99f);
  CHECK(trust.of({100, true}) < 1);
  CHECK(trust.of({0, false}) < 0.01f);
  CHECK(trust.of({0, false}) > 0);
}
