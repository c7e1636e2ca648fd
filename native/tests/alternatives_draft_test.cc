// The policy's own probabilities at a match, and how a session with a seed uses them.
#include <cmath>

#include "draft/drafter.h"
#include "test.h"

using namespace histospec;

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

}  // namespace

TEST_CASE("The longest match counts, and of several the newest") {
  const std::vector<Token> head = {1, 2, 3}, context = {1, 2, 3, 4, 5, 6};
  const auto response = [&](std::vector<Token> tokens) {
    Response r{head, std::move(tokens)};
    r.alternatives = Packed(17, {{r.tokens.back() + 1, 18}}).bytes;
    r.alternatives[0] = 1 << 6;  // the count of the fourth token
    return r;
  };
  const Response longest = response({4, 5, 6, 7}), shorter = response({20, 21, 6, 11}),
                 newest = response({4, 5, 6, 15});
  const auto next_of = [&](std::initializer_list<const Response*> oldest_first) {
    Segments::List list;
    for (const Response* r : oldest_first) {
      const std::vector<ResponseView> views = {r->view()};
      list.push_back(Segment::build(views));
    }
    const Segments segments(list);
    SegmentSource source;
    source.reset(segments, context);
    const auto match = source.weighed_match(segments);
    CHECK(match.has_value());
    CHECK_EQ(match->others.count(), 1);
    CHECK_EQ(match->others.token(0), match->next + 1);
    CHECK(std::abs(match->probability() - std::exp(-17.0f / Alternatives::kLevelsPerNat)) < 1e-6f);
    return match->next;
  };
  CHECK_EQ(next_of({&longest}), 7);
  CHECK_EQ(next_of({&longest, &shorter}), 7);
  CHECK_EQ(next_of({&shorter, &longest}), 7);
  CHECK_EQ(next_of({&longest, &newest}), 15);
  CHECK_EQ(next_of({&newest, &longest, &shorter}), 7);
}

TEST_CASE("Without a match or without alternatives there is no weighed match") {
  const std::vector<Token> head = {1, 2, 3}, other = {50, 51, 52};
  const Response plain{head, {4, 5, 6, 7}};
  const std::vector<ResponseView> views = {plain.view()};
  const Segments segments({Segment::build(views)}), none;
  SegmentSource source;
  source.reset(segments, std::vector<Token>{1, 2, 3, 4});
  CHECK_FALSE(source.weighed_match(segments).has_value());
  source.reset(segments, other);
  CHECK_FALSE(source.weighed_match(segments).has_value());
  source.reset(none, head);
  CHECK_FALSE(source.weighed_match(none).has_value());
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
  const auto segments = std::make_shared<const Segments>(Segments::List{Segment::build(views)});
  const auto nothing = std::make_shared<const Segments>();
  int with_b = 0, others = 0;
  for (std::int64_t seed = 0; seed < 400; ++seed) {
    CAPTURE(seed);
    LiveText live;
    const auto own = live.open(head);
    const std::vector<Token> before = {4, 5, 6};
    live.append(own, before);
    NoiseCounter noise;
    for (const bool seeded : {false, true}) {
      DraftContext context;
      for (Token token : head) context.tail.push(token);
      for (Token token : before) context.tail.push(token);
      context.generated = 3;
      context.newest = 2;
      context.history_source.reset(*segments, context.tail.tokens());
      context.namespace_source.reset(*nothing, context.tail.tokens());
      if (seeded) {
        for (const auto& part : {head, before}) {
          for (Token token : part) noise.push(token);
        }
        context.noise.start(seed, noise);
      }
      const Estimator estimator;
      Draft draft;
      histospec::draft(context, {*segments, *nothing, LiveSource(live, own)}, estimator, {}, {1, 0.0f}, draft);
      CHECK_EQ(draft.tokens.size(), 1);
      CHECK_EQ(draft.origins[0].source, kHistory);
      CHECK_EQ(draft.origins[0].age, 2);  // also of an alternative: that of the response that has it
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
