// The policy's probabilities at the matches, against plain lists; and how a session with a seed uses them.
#include "draft/likelihood.h"

#include <cmath>
#include <map>

#include "draft/drafter.h"
#include "random_text.h"
#include "test.h"

using namespace histospec;
using testing::Random;

namespace {

// A place with these levels, as PackedAlternatives reads it.
struct Packed {
  Packed(std::uint8_t sampled, std::initializer_list<std::pair<Token, std::uint8_t>> others) {
    bytes = {static_cast<std::uint8_t>(others.size()), sampled};
    for (const auto& [token, level] : others) {
      const auto word = static_cast<std::uint32_t>(token) << 8 | level;
      for (int shift = 0; shift < 32; shift += 8) bytes.push_back(static_cast<std::uint8_t>(word >> shift));
    }
  }
  Alternatives place() const { return PackedAlternatives(bytes, 1).previous(); }

  std::vector<std::uint8_t> bytes;
};

float probability(int level) { return std::exp(-static_cast<float>(level) / Alternatives::kLevelsPerNat); }

}  // namespace

TEST_CASE("Likelihood is the average of the matches") {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    Likelihood likelihood;
    std::map<Token, double> mass;
    double total = 0;
    for (std::size_t matches = random.between(1, 20); matches > 0; --matches) {
      const auto token = [&] { return static_cast<Token>(random.below(10)); };
      const auto level = [&] { return static_cast<std::uint8_t>(random.below(256)); };
      const Packed alone(0, {}), two(level(), {{token(), level()}, {token(), level()}});
      const float weight = 1 + static_cast<float>(random.below(100));
      const Token followed = token();
      const bool some = random.one_in(2);
      likelihood.add(followed, (some ? two : alone).place(), weight);
      total += weight;
      mass[followed] += weight * (some ? probability(two.bytes[1]) : 0.97);
      for (int i = 0; some && i < 2; ++i) {
        mass[two.place().token(i)] += weight * std::exp(two.place().log_probability(i));
      }
    }
    CHECK_EQ(likelihood.tokens().size(), mass.size());
    for (Token token = 0; token < 10; ++token) {
      CHECK(std::abs(likelihood.of(token) - (mass.contains(token) ? mass[token] / total : 0)) < 1e-5);
    }
  }
}

TEST_CASE("Newer matches weigh more") {
  for (std::uint8_t age = 0; age <= kOldest; ++age) {
    CHECK(Likelihood::weight(age) > 0);
    if (age > 0) CHECK(Likelihood::weight(age) < Likelihood::weight(age - 1));
  }
}

TEST_CASE("Only the longest matches count") {
  const std::vector<Token> head = {1, 2, 3}, context = {1, 2, 3, 4, 5, 6};
  Response longest{head, {4, 5, 6, 7}}, shorter{head, {20, 21, 6, 11}};
  for (Response* r : {&longest, &shorter}) {
    r->alternatives = Packed(17, {{r->tokens.back() + 1, 17}}).bytes;
    r->alternatives[0] = 1 << 6;  // the count of the fourth token
  }
  const std::vector<ResponseView> views = {longest.view(), shorter.view()};
  const Segments segments(1, Segment::build(views));
  SegmentSource source;
  source.reset(segments, context);
  Likelihood likelihood;
  source.weigh_matches(0, likelihood);
  CHECK_EQ(likelihood.tokens().size(), 2);
  CHECK(likelihood.of(7) > 0);
  CHECK(likelihood.of(8) > 0);
}

// Four responses say A after their first tokens and four say C, and each says that B was almost as probable. No
// response says B, so only the alternatives lead to it. A session with a seed drafts B where the noise is for it;
// others never.
TEST_CASE("An alternative that no response took is drafted if the noise takes it") {
  constexpr Token kA = 7, kB = 9, kC = 11;
  const std::vector<Token> head = {1, 2, 3};
  const auto saying = [&](Token token, Token other) {
    Response r{head, {4, 5, 6, token, 8, 8, 8}};
    r.alternatives = Packed(17, {{other, 17}, {kB, 18}}).bytes;  // 0.35, 0.35 and 0.32
    r.alternatives[0] = 2 << 6;                                  // the counts: of the fourth token
    r.alternatives.insert(r.alternatives.begin() + 1, 0);
    return r;
  };
  const Response a = saying(kA, kC), c = saying(kC, kA);
  const std::vector<ResponseView> views = {a.view(), c.view(), a.view(), c.view(),
                                           a.view(), c.view(), a.view(), c.view()};
  const auto segments = std::make_shared<const Segments>(1, Segment::build(views));
  const auto nothing = std::make_shared<const Segments>();
  int with_b = 0, others = 0;
  for (std::int64_t seed = 0; seed < 400; ++seed) {
    CAPTURE(seed);
    LiveText live;
    const auto own = live.open(head);
    const std::vector<Token> before = {4, 5, 6};
    live.append(own, before);
    PlaceCounter places;
    for (const bool seeded : {false, true}) {
      DraftContext context;
      for (Token token : head) context.tail.push(token);
      for (Token token : before) context.tail.push(token);
      context.generated = 3;
      context.history_source.reset(*segments, context.tail.tokens());
      context.namespace_source.reset(*nothing, context.tail.tokens());
      if (seeded) {
        for (const auto& part : {head, before}) {
          for (Token token : part) places.push(token);
        }
        context.places.start(seed, places);
      }
      const Estimator estimator;
      Draft draft;
      histospec::draft(context, LiveSource(live, own), estimator, {}, {1, 0.0f}, draft);
      CHECK_EQ(draft.tokens.size(), 1);
      if (!seeded) {
        CHECK(draft.tokens[0] != kB);
        continue;
      }
      ++(draft.tokens[0] == kB ? with_b : others);
    }
  }
  CHECK(with_b > 10);
  CHECK(others > 200);
}
