#include "index/segment.h"

#include <set>
#include <tuple>

#include "random_text.h"
#include "reference_model.h"
#include "test.h"

// Private members, for tests that damage them: explicit instantiations may name what is private.
namespace histospec {
Words& previous_row_of(Segment&);
Words& first_of(Segment&);
Rows& rows_of(Segment&);
std::span<Segment::Extent>& extents_of(Segment&);
template <auto previous_row, auto first, auto rows, auto extents>
struct Opened {
  friend Words& previous_row_of(Segment& s) { return s.*previous_row; }
  friend Words& first_of(Segment& s) { return s.*first; }
  friend Rows& rows_of(Segment& s) { return s.*rows; }
  friend std::span<Segment::Extent>& extents_of(Segment& s) { return s.*extents; }
};
template struct Opened<&Segment::previous_row_, &Segment::first_, &Segment::rows_, &Segment::extents_>;
}  // namespace histospec

using namespace histospec;
using testing::occurrences;
using testing::Random;

namespace {

std::shared_ptr<const Segment> build(const std::vector<Response>& responses) {
  std::vector<ResponseView> views;
  for (const Response& r : responses) views.push_back(r.view());
  return Segment::build(views);
}

std::vector<Response> random_responses(Random& random) {
  const std::size_t alphabet = random.between(1, 6);
  std::vector<Response> out(random.below(6));
  for (Response& r : out) {
    r.head = random.text(random.one_in(3) ? 0 : random.below(40), alphabet);
    r.tokens = random.one_in(6) ? std::vector<Token>() : random.text(random.below(120), alphabet);
    r.epoch = static_cast<std::int64_t>(random.below(7)) - 1;  // more than rows can tell apart
    if (random.one_in(3)) {
      for (std::size_t i = 0; i < r.tokens.size(); ++i)
        r.generated.push_back(static_cast<std::uint8_t>(random.below(3)));
    }
    // Ranks are by first appearance, so tokens need not be small: spread them over the whole range.
    const bool spread = random.one_in(4);
    for (auto* tokens : {&r.head, &r.tokens}) {
      for (Token& token : *tokens) token = spread ? INT32_MAX - token * 1000003 : token;
    }
  }
  return out;
}

void check_round_trip(const std::vector<Response>& responses, const Segment& segment) {
  std::vector<Response> expected;
  std::size_t tokens = 0;
  for (const Response& r : responses) {
    expected.push_back(testing::normal(r));
    tokens += r.tokens.size();
  }
  const std::vector<Response> back = segment.responses();
  CHECK_EQ(back.size(), expected.size());
  for (std::size_t j = 0; j < back.size(); ++j) {
    CHECK_EQ(back[j].head, expected[j].head);
    CHECK_EQ(back[j].tokens, expected[j].tokens);
    CHECK_EQ(back[j].generated, expected[j].generated);
    CHECK_EQ(back[j].epoch, expected[j].epoch);
  }
  CHECK_EQ(segment.tokens(), tokens);
  segment.check_integrity();
}

// A row as the reference model sees it: how much of the context stands there, what followed, and where.
using Seen = std::tuple<int, Token, std::int64_t>;

// The rows nearest to a gap, nearest first.
struct Near {
  std::vector<Neighbour> above, below;

  std::vector<Neighbour> all() const {
    std::vector<Neighbour> both = above;
    both.insert(both.end(), below.begin(), below.end());
    return both;
  }
};

Near near_to(const Segment& segment, const RowGap& gap, int most) {
  Near near;
  segment.each_near(gap, most, [&](const Neighbour& neighbour, int nearness) {
    // Of each side the nearest comes first, of both the one above.
    const bool above = near.below.empty() && static_cast<int>(near.above.size()) == nearness && gap.above > 0;
    std::vector<Neighbour>& side = above ? near.above : near.below;
    CHECK_EQ(static_cast<int>(side.size()), nearness);
    side.push_back(neighbour);
  });
  CHECK(static_cast<int>(near.above.size()) <= most);
  CHECK(static_cast<int>(near.below.size()) <= most);
  return near;
}

std::vector<Neighbour> neighbours(const Segment& segment, const RowGap& gap) {
  return near_to(segment, gap, Segment::most_near(gap)).all();
}

// One side of a gap: match lengths never grow with the distance.
void check_side(std::span<const Neighbour> side, int longest) {
  CHECK_EQ(side.empty(), longest == 0);
  for (std::size_t i = 0; i < side.size(); ++i) {
    CHECK(side[i].match_length >= 1);
    if (i == 0) CHECK_EQ(side[i].match_length, longest);
    if (i > 0) CHECK(side[i].match_length <= side[i - 1].match_length);
  }
}

// Each listed row exists, with exactly that match length. A side that is not full left nothing out. What a full side
// left out matches no longer than the last row it lists. So no gap left out matches longer than the last rows of the
// full sides.
void check_context(const std::vector<Response>& responses, const Segment& segment, const RowGap& gap,
                   const std::vector<Token>& context, int most_rows = Segment::kNear) {
  const int full = std::min(most_rows, Segment::most_near(gap));
  const Near near = near_to(segment, gap, full);
  check_side(near.above, gap.above);
  check_side(near.below, gap.below);

  std::vector<Seen> left_out, listed;
  int depth = 0;
  for (const auto& o : occurrences(responses, context)) {
    left_out.emplace_back(o.length, o.next, std::clamp<std::int64_t>(o.offset, 0, UINT16_MAX));
    depth = std::max(depth, o.length);
  }
  CHECK_EQ(gap.depth(), depth);
  for (const Neighbour& n : near.all()) {
    listed.emplace_back(n.match_length,
                        n.next_rank == Segment::kSeparator ? testing::kNothing : segment.token(n.next_rank), n.offset);
  }
  for (const Seen& seen : listed) {
    const auto known = std::ranges::find(left_out, seen);
    CHECK(known != left_out.end());
    left_out.erase(known);
  }
  int most = 0;
  for (const auto& side : {near.above, near.below}) {
    if (static_cast<int>(side.size()) == full) most = std::max<int>(most, side.back().match_length);
  }
  for (const auto& [match_length, next, offset] : left_out) CHECK(match_length <= most);
}

// A context worth asking about: often a piece of a response, sometimes bent.
std::vector<Token> random_context(Random& random, const std::vector<Response>& responses) {
  std::vector<Token> context;
  if (!responses.empty()) {
    const Response& r = responses[random.below(responses.size())];
    context = r.head;
    context.insert(context.end(), r.tokens.begin(), r.tokens.end());
    context.resize(random.below(context.size() + 1));
  }
  for (std::size_t extra = random.one_in(2) ? 0 : random.below(4); extra > 0; --extra) {
    context.push_back(random.one_in(8) ? 123456789 : static_cast<Token>(random.below(4)));
  }
  return context;
}

}  // namespace

TEST_CASE("A segment returns the responses that it indexed") {
  for (std::uint64_t seed = 0; seed < 500; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    const auto responses = random_responses(random);
    check_round_trip(responses, *build(responses));
  }
}

TEST_CASE("A segment finds the longest matches of every context") {
  for (std::uint64_t seed = 0; seed < 250; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    const auto responses = random_responses(random);
    const auto segment = build(responses);
    for (int i = 0; i < 12; ++i) {
      const std::vector<Token> context = random_context(random, responses);
      check_context(responses, *segment, segment->find(context), context);
      check_context(responses, *segment, segment->find(context), context, 2);
    }
  }
}

// The places are equal up to kMaxOrder tokens, which is what find() reads. With a longer context, extend() knows more:
// among the rows that match kMaxOrder tokens, its gap is nearest to those that match even more.
TEST_CASE("Extending a gap finds the same as looking up the whole context") {
  for (std::uint64_t seed = 0; seed < 150; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    const auto responses = random_responses(random);
    const auto segment = build(responses);
    std::vector<Token> context;
    RowGap gap = segment->find({});
    for (int i = 0; i < 80; ++i) {
      // Mostly what did follow, so that matches grow to their full depth and beyond.
      const auto places = occurrences(responses, context);
      const Token followed = places.empty() ? testing::kNothing : places[random.below(places.size())].next;
      context.push_back(followed == testing::kNothing || random.one_in(20) ? static_cast<Token>(random.below(4))
                                                                           : followed);
      segment->extend(gap, context.back());
      const RowGap found = segment->find(context);
      CHECK_EQ(gap.depth(), found.depth());
      if (context.size() <= kMaxOrder) {
        CHECK_EQ(gap.row, found.row);
        CHECK_EQ(gap.above, found.above);
        CHECK_EQ(gap.below, found.below);
      }
      check_context(responses, *segment, gap, context);
      if (context.size() > kMaxOrder) check_context(responses, *segment, found, context);
    }
  }
}

TEST_CASE("A token that the segment does not have ends every match") {
  const std::vector<Response> responses = {{{}, {1, 2, 3, 1, 2, 3}, {}, 0}};
  const auto segment = build(responses);
  RowGap gap = segment->find(std::vector<Token>{1, 2, 3});
  CHECK_EQ(gap.depth(), 3);
  segment->extend(gap, 77);
  CHECK_EQ(gap.depth(), 0);
  CHECK(neighbours(*segment, gap).empty());
  segment->extend(gap, 2);
  CHECK_EQ(gap.depth(), 1);
}

TEST_CASE("Match lengths are counted up to kMaxOrder") {
  for (std::size_t size : {31u, 32u, 33u, 64u, 200u}) {
    std::vector<Token> text(size);
    for (std::size_t i = 0; i < size; ++i) text[i] = static_cast<Token>(i);
    const std::vector<Response> responses = {{{}, text, {}, 0}, {{}, text, {}, 0}};
    const auto segment = build(responses);
    RowGap gap = segment->find({});
    for (std::size_t i = 0; i < size; ++i) {
      segment->extend(gap, text[i]);
      const auto expected = static_cast<int>(std::min<std::size_t>(i + 1, kMaxOrder));
      CHECK_EQ(gap.depth(), expected);
      const auto near = neighbours(*segment, gap);
      CHECK_EQ(near.size(), 2u);
      for (const Neighbour& n : near) CHECK_EQ(n.match_length, expected);
    }
  }
}

// Each context is shorter than the LCPs of the rows around its gap.
TEST_CASE("Short contexts are found among long repeats") {
  for (std::size_t copies : {1u, 2u, 9u}) {
    const std::vector<Response> responses(copies, {{}, std::vector<Token>(100, 5), {}, 0});
    const auto segment = build(responses);
    RowGap gap = segment->find({});
    for (std::size_t size = 1; size <= 80; ++size) {
      segment->extend(gap, 5);
      check_context(responses, *segment, gap, std::vector<Token>(size, 5));
    }
  }
}

TEST_CASE("No match continues from one response into another") {
  const std::vector<Response> responses = {{{}, {1, 2, 3}, {}, 0}, {{}, {4, 5}, {}, 0}, {{9}, {1, 2}, {}, 0}};
  const auto segment = build(responses);
  CHECK_EQ(segment->find(std::vector<Token>{3, 4}).depth(), 1);
  CHECK_EQ(segment->find(std::vector<Token>{2, 1}).depth(), 1);  // around the end of the circle
  CHECK_EQ(segment->find(std::vector<Token>{9, 1, 2}).depth(), 3);
}

// Contexts that are equal up to the beginning of their responses match no longer than that.
TEST_CASE("No match goes beyond the beginning of a response") {
  const std::vector<Response> responses(20, {{}, {1, 2}, {}, 0});
  const auto segment = build(responses);
  const RowGap gap = segment->find(std::vector<Token>{1, 2});
  for (const Neighbour& n : neighbours(*segment, gap)) CHECK_EQ(n.match_length, 2);
  check_context(responses, *segment, gap, {1, 2, 1, 2});
  check_context(responses, *segment, segment->find(std::vector<Token>{1, 2, 1, 2}), {1, 2, 1, 2});
}

TEST_CASE("Masked tokens are context, but never a next token") {
  const std::vector<Response> responses = {{{1}, {2, 3, 4, 2, 3, 5}, {1, 0, 1, 1, 1, 0}, 7}};
  const auto segment = build(responses);
  const auto next = [&](const std::vector<Token>& context) {
    std::multiset<Token> out;
    for (const Neighbour& n : neighbours(*segment, segment->find(context))) {
      out.insert(n.next_rank == Segment::kSeparator ? testing::kNothing : segment->token(n.next_rank));
    }
    return out;
  };
  CHECK_EQ(next({2}), (std::multiset<Token>{testing::kNothing, 3}));
  CHECK_EQ(next({2, 3}), (std::multiset<Token>{testing::kNothing, 4}));
  check_round_trip(responses, *segment);
}

TEST_CASE("A segment of more than 65,535 tokens has wide words") {
  for (std::size_t size : {65533u, 65534u, 65535u, 65536u, 70000u}) {
    CAPTURE(size);
    Random random(size);
    // The text is one separator longer than the tokens.
    std::vector<Response> responses = {{{}, random.text(size, 50), {}, 3}};
    const auto segment = build(responses);
    check_round_trip(responses, *segment);
    for (int i = 0; i < 3; ++i) {
      const std::vector<Token> context = random_context(random, responses);
      check_context(responses, *segment, segment->find(context), context);
    }
  }
}

TEST_CASE("An alphabet may be larger than two bytes") {
  std::vector<Response> responses(2);
  for (Token token = 0; token < 70000; ++token) responses[token % 2].tokens.push_back(token * 30001 % 70001);
  const auto segment = build(responses);
  check_round_trip(responses, *segment);
  std::vector<Token> context(responses[1].tokens.begin(), responses[1].tokens.begin() + 30000);
  check_context(responses, *segment, segment->find(context), context);
}

TEST_CASE("A segment may be empty, and so may its responses") {
  const auto segment = build({});
  segment->check_integrity();
  CHECK_EQ(segment->responses().size(), 0u);
  CHECK_EQ(segment->rank(5), Segment::kSeparator);
  const RowGap gap = segment->find(std::vector<Token>{1, 2});
  CHECK_EQ(gap.depth(), 0);
  CHECK(neighbours(*segment, gap).empty());
  const std::vector<Response> empty = {{{}, {}, {}, 1}, {{}, {}, {}, 2}};
  check_round_trip(empty, *build(empty));
}

TEST_CASE("A token that the segment does not have has no rank") {
  const auto segment = build({{{}, {0, INT32_MAX}, {}, 0}});
  for (Token token : {-1, 1, INT32_MIN, INT32_MAX - 1}) CHECK_EQ(segment->rank(token), Segment::kSeparator);
  CHECK_EQ(segment->token(segment->rank(INT32_MAX)), INT32_MAX);
  CHECK_EQ(segment->token(segment->rank(0)), 0);
}

TEST_CASE("Multiples of a power of two keep their ranks") {
  // Tokens that differ in few high bits only; all must be found after the table grew.
  std::vector<Response> responses(1);
  for (Token token = 0; token < 5000; ++token) responses[0].tokens.push_back(token << 18);
  check_round_trip(responses, *build(responses));
}

TEST_CASE("check_integrity() sees any damage") {
  Random random(1);
  const std::vector<Response> responses = {{{1, 2}, random.text(200, 5), {}, 1}, {{1, 2}, random.text(200, 5), {}, 2}};
  for (auto* words : {&previous_row_of, &first_of}) {
    for (int i = 0; i < 40; ++i) {
      const auto segment = std::const_pointer_cast<Segment>(build(responses));
      Words& damaged = words(*segment);
      const std::size_t at = random.below(damaged.size());
      const std::uint32_t value = damaged[at] ^ static_cast<std::uint32_t>(1 + random.below(2));
      damaged.set(at, value);
      INFO("word ", at);
      CHECK_THROWS_AS(segment->check_integrity(), std::logic_error);
    }
  }
  for (int i = 0; i < 160; ++i) {
    const auto segment = std::const_pointer_cast<Segment>(build(responses));
    const auto at = static_cast<std::uint32_t>(random.below(segment->rows()));
    const auto bit = static_cast<std::uint8_t>(1 + random.below(2));
    Row row = rows_of(*segment)[at];
    if (i % 4 == 0) row.next_rank ^= bit;
    if (i % 4 == 1) row.next_row ^= bit;
    if (i % 4 == 2) row.offset ^= bit;
    if (i % 4 == 3) row.lcp ^= bit;
    rows_of(*segment).set(at, row);
    INFO("row ", at);
    CHECK_THROWS_AS(segment->check_integrity(), std::logic_error);
  }
  const auto segment = std::const_pointer_cast<Segment>(build(responses));
  ++extents_of(*segment)[0].end;
  CHECK_THROWS_AS(segment->check_integrity(), std::logic_error);
}
