#include "segment.h"

#include <map>

#include "check.h"
#include "random_text.h"
#include "reference_model.h"

// Private members, for tests that damage them: explicit instantiations may name what is private.
namespace histospec {
Words& next_of(Segment&);
Words& position_of(Segment&);
Words& from_of(Segment&);
Words& first_of(Segment&);
std::vector<Segment::Extent>& extents_of(Segment&);
template <auto next, auto position, auto from, auto first, auto extents>
struct Opened {
  friend Words& next_of(Segment& s) { return s.*next; }
  friend Words& position_of(Segment& s) { return s.*position; }
  friend Words& from_of(Segment& s) { return s.*from; }
  friend Words& first_of(Segment& s) { return s.*first; }
  friend std::vector<Segment::Extent>& extents_of(Segment& s) { return s.*extents; }
};
template struct Opened<&Segment::next_, &Segment::position_, &Segment::from_, &Segment::first_, &Segment::extents_>;
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
    r.epoch = static_cast<std::int64_t>(random.below(4)) - 1;
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

// Everything that can be asked about a context, for all orders.
void check_context(const std::vector<Response>& responses, const Segment& segment, const Ladder& ladder,
                   const std::vector<Token>& context) {
  const auto places = occurrences(responses, context);
  int depth = 0;
  for (const auto& place : places) depth = std::max(depth, place.length);
  CHECK_EQ(ladder.depth, depth);
  for (int order = 1; order <= kMaxOrder; ++order) {
    std::multimap<Token, std::int64_t> expected, found;
    for (const auto& place : places) {
      if (place.length >= order) expected.emplace(place.next, place.offset);
    }
    CHECK_EQ(ladder.size(order), expected.size());
    if (ladder.size(order) == 0) continue;
    const std::uint32_t low = ladder.low[order - 1], high = ladder.high[order - 1];
    std::map<Token, std::uint32_t> counts;
    for (std::uint32_t row = low; row < high; ++row) {
      const std::uint32_t next = segment.next(row);
      found.emplace(next == Segment::kSeparator ? testing::kNothing : segment.token(next), segment.offset(row));
    }
    const auto sorted = [](const std::multimap<Token, std::int64_t>& all) {
      std::vector<std::pair<Token, std::int64_t>> pairs(all.begin(), all.end());
      std::ranges::sort(pairs);
      return pairs;
    };
    CHECK_EQ(sorted(found), sorted(expected));
    for (const auto& [token, offset] : expected) {
      if (token != testing::kNothing) CHECK_EQ(segment.count(low, high, segment.rank(token)), expected.count(token));
    }
  }
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

TEST(gives_back_what_it_indexed) {
  for (std::uint64_t seed = 0; seed < 500; ++seed) {
    check::subject = "seed " + std::to_string(seed);
    Random random(seed);
    const auto responses = random_responses(random);
    check_round_trip(responses, *build(responses));
  }
}

TEST(finds_every_context_of_every_order) {
  for (std::uint64_t seed = 0; seed < 250; ++seed) {
    check::subject = "seed " + std::to_string(seed);
    Random random(seed);
    const auto responses = random_responses(random);
    const auto segment = build(responses);
    for (int i = 0; i < 12; ++i) {
      const std::vector<Token> context = random_context(random, responses);
      check_context(responses, *segment, segment->find(context), context);
    }
  }
}

TEST(extending_is_finding) {
  for (std::uint64_t seed = 0; seed < 150; ++seed) {
    check::subject = "seed " + std::to_string(seed);
    Random random(seed);
    const auto responses = random_responses(random);
    const auto segment = build(responses);
    std::vector<Token> context;
    Ladder ladder;
    for (int i = 0; i < 60; ++i) {
      // Mostly what did follow, so that ladders grow to their full depth and beyond.
      const auto places = occurrences(responses, context);
      const Token followed = places.empty() ? testing::kNothing : places[random.below(places.size())].next;
      context.push_back(followed == testing::kNothing || random.one_in(20) ? static_cast<Token>(random.below(4))
                                                                           : followed);
      segment->extend(ladder, context.back());
      const Ladder found = segment->find(context);
      CHECK_EQ(ladder.depth, found.depth);
      for (int k = 0; k < ladder.depth; ++k) {
        CHECK_EQ(ladder.low[k], found.low[k]);
        CHECK_EQ(ladder.high[k], found.high[k]);
      }
      if (i % 10 == 0) check_context(responses, *segment, ladder, context);
    }
  }
}

TEST(no_response_continues_another) {
  const std::vector<Response> responses = {{{}, {1, 2, 3}, {}, 0}, {{}, {4, 5}, {}, 0}, {{9}, {1, 2}, {}, 0}};
  const auto segment = build(responses);
  CHECK_EQ(segment->find(std::vector<Token>{3, 4}).depth, 1);
  CHECK_EQ(segment->find(std::vector<Token>{2, 1}).depth, 1);  // around the end of the circle
  CHECK_EQ(segment->find(std::vector<Token>{9, 1, 2}).depth, 3);
}

TEST(masked_tokens_are_context_but_never_next) {
  const std::vector<Response> responses = {{{1}, {2, 3, 4, 2, 3, 5}, {1, 0, 1, 1, 1, 0}, 7}};
  const auto segment = build(responses);
  const Ladder ladder = segment->find(std::vector<Token>{2});
  CHECK_EQ(ladder.size(1), 2u);
  CHECK_EQ(segment->count(ladder.low[0], ladder.high[0], segment->rank(3)), 1u);
  CHECK_EQ(segment->find(std::vector<Token>{2, 3}).size(2), 2u);
  check_round_trip(responses, *segment);
}

TEST(words_widen_at_65536) {
  for (std::size_t size : {65533u, 65534u, 65535u, 65536u, 70000u}) {
    check::subject = std::to_string(size) + " tokens";
    Random random(size);
    // The text is one separator longer than the tokens.
    std::vector<Response> responses = {{{}, random.text(size, 50), {}, 3}};
    const auto segment = build(responses);
    check_round_trip(responses, *segment);
    for (int i = 0; i < 3; ++i) {
      const std::vector<Token> context = random_context(random, responses);
      const Ladder ladder = segment->find(context);
      const auto places = occurrences(responses, context);
      for (int order = 1; order <= kMaxOrder; ++order) {
        const auto n = std::ranges::count_if(places, [order](const auto& place) { return place.length >= order; });
        CHECK_EQ(ladder.size(order), static_cast<std::uint32_t>(n));
        if (n == 0) continue;
        // Wide intervals are counted by search, narrow ones by scanning: both must say the same as looking.
        std::map<Token, std::uint32_t> naive;
        for (const auto& place : places) naive[place.next] += place.length >= order;
        for (const auto& [token, count] : naive) {
          if (token == testing::kNothing) continue;
          CHECK_EQ(segment->count(ladder.low[order - 1], ladder.high[order - 1], segment->rank(token)), count);
        }
      }
    }
  }
}

TEST(an_alphabet_larger_than_two_bytes) {
  std::vector<Response> responses(2);
  for (Token token = 0; token < 70000; ++token) responses[token % 2].tokens.push_back(token * 30001 % 70001);
  const auto segment = build(responses);
  check_round_trip(responses, *segment);
  std::vector<Token> context(responses[1].tokens.begin(), responses[1].tokens.begin() + 30000);
  check_context(responses, *segment, segment->find(context), context);
}

TEST(nothing_at_all) {
  const auto segment = build({});
  segment->check_integrity();
  CHECK_EQ(segment->responses().size(), 0u);
  CHECK_EQ(segment->rank(5), Segment::kSeparator);
  CHECK_EQ(segment->find(std::vector<Token>{1, 2}).depth, 0);
  const std::vector<Response> empty = {{{}, {}, {}, 1}, {{}, {}, {}, 2}};
  check_round_trip(empty, *build(empty));
}

TEST(tokens_it_does_not_have) {
  const auto segment = build({{{}, {0, INT32_MAX}, {}, 0}});
  for (Token token : {-1, 1, INT32_MIN, INT32_MAX - 1}) CHECK_EQ(segment->rank(token), Segment::kSeparator);
  CHECK_EQ(segment->token(segment->rank(INT32_MAX)), INT32_MAX);
  CHECK_EQ(segment->token(segment->rank(0)), 0);
}

TEST(tokens_that_share_a_slot) {
  // Multiples of 2^k hash to few slots of a small table; all must be found after it grew.
  std::vector<Response> responses(1);
  for (Token token = 0; token < 5000; ++token) responses[0].tokens.push_back(token << 18);
  check_round_trip(responses, *build(responses));
}

TEST(integrity_check_sees_damage) {
  Random random(1);
  const std::vector<Response> responses = {{{1, 2}, random.text(200, 5), {}, 1}, {{1, 2}, random.text(200, 5), {}, 2}};
  std::size_t damages = 0;
  for (auto* words : {&next_of, &position_of, &from_of, &first_of}) {
    for (int i = 0; i < 40; ++i) {
      const auto segment = std::const_pointer_cast<Segment>(build(responses));
      Words& damaged = words(*segment);
      const std::size_t at = random.below(damaged.size());
      const std::uint32_t value = damaged[at] ^ static_cast<std::uint32_t>(1 + random.below(2));
      damaged.set(at, value);
      check::subject = "damage " + std::to_string(damages++) + " at " + std::to_string(at);
      CHECK_THROWS(std::logic_error, segment->check_integrity());
    }
  }
  const auto segment = std::const_pointer_cast<Segment>(build(responses));
  ++extents_of(*segment)[0].end;
  CHECK_THROWS(std::logic_error, segment->check_integrity());
}

int main() { return check::main(); }
