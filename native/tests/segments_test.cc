#include "index/segments.h"

#include <bit>
#include <set>

#include "random_text.h"
#include "reference_model.h"
#include "test.h"

using namespace histospec;
using testing::Random;

namespace {

std::vector<ResponseView> views_of(const std::vector<Response>& responses) {
  std::vector<ResponseView> views;
  for (const Response& r : responses) views.push_back(r.view());
  return views;
}

std::vector<Response> all_of(const Segments& segments) {
  std::vector<Response> out;
  for (const auto& segment : segments) {
    for (Response& r : segment->responses()) out.push_back(std::move(r));
  }
  return out;
}

// Every response as one number, so that order and loss show.
std::vector<std::int64_t> names(const std::vector<Response>& responses) {
  std::vector<std::int64_t> out;
  for (const Response& r : responses) out.push_back(r.tokens.at(0));
  return out;
}

std::int64_t oldest_kept(const std::vector<Response>& responses, std::size_t epochs) {
  std::set<std::int64_t> seen;
  for (const Response& r : responses) seen.insert(r.epoch);
  while (seen.size() > epochs) seen.erase(seen.begin());
  return seen.empty() ? 0 : *seen.begin();
}

}  // namespace

TEST_CASE("Segments keep the window of epochs in order, and count what they evict") {
  for (std::uint64_t seed = 0; seed < 150; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    const int epochs = static_cast<int>(random.between(1, 4));
    auto segments = std::make_shared<const Segments>();
    std::vector<Response> added;
    LeftOut evicted;
    for (int step = 0; step < 25; ++step) {
      std::vector<Response> fresh(random.between(1, 4));
      for (Response& r : fresh) {
        r.head = {1, 2, 3};
        r.tokens = random.text(random.below(30), 4);
        r.tokens.insert(r.tokens.begin(), static_cast<Token>(1000 + added.size() + (&r - fresh.data())));
        r.epoch = step / 3 - (random.one_in(4) ? static_cast<std::int64_t>(random.below(4)) : 0);
      }
      const auto before = segments;
      const std::vector<std::int64_t> before_names = names(all_of(*before));
      std::vector<Response> candidates = all_of(*before);
      candidates.insert(candidates.end(), fresh.begin(), fresh.end());
      added.insert(added.end(), fresh.begin(), fresh.end());
      segments = with_responses(*before, views_of(fresh), {epochs}, evicted);

      CHECK_EQ(names(all_of(*before)), before_names);  // a snapshot never changes
      const std::vector<Response> held = all_of(*segments);
      CHECK_EQ(held.size() + evicted.all(), added.size());
      // Everything in the window is there, in order; what else is there is in order, too.
      const std::int64_t oldest = oldest_kept(candidates, static_cast<std::size_t>(epochs));
      std::vector<std::int64_t> kept;
      for (const Response& r : candidates) {
        if (r.epoch >= oldest) kept.push_back(r.tokens[0]);
      }
      const std::vector<std::int64_t> held_names = names(held);
      CHECK(std::ranges::includes(held_names, kept));
      CHECK(std::ranges::is_sorted(held_names));
      for (const Response& r : held) {
        const Response& original = added[r.tokens[0] - 1000];
        CHECK_EQ(r.tokens, original.tokens);
        CHECK_EQ(r.head, original.head);
        CHECK_EQ(r.epoch, original.epoch);
      }
      // No segment is too old altogether.
      for (const auto& segment : *segments) {
        CHECK(std::ranges::any_of(segment->extents(), [oldest](const auto& e) { return e.epoch >= oldest; }));
        segment->check_integrity();
      }
    }
  }
}

TEST_CASE("The number of segments grows with the logarithm of the text") {
  for (std::size_t growth : {2u, 4u}) {
    auto segments = std::make_shared<const Segments>();
    LeftOut evicted;
    std::size_t tokens = 0;
    Random random(growth);
    for (int step = 0; step < 300; ++step) {
      const std::vector<Response> fresh = {{{}, random.text(random.between(1, 40), 50), {}, 0}};
      tokens += fresh[0].tokens.size();
      segments = with_responses(*segments, views_of(fresh), {8}, evicted, {.growth = growth, .fan_in = 2});
      CHECK(segments->size() <= static_cast<std::size_t>(std::bit_width(tokens)));
      for (std::size_t s = 1; s < segments->size(); ++s) {
        CHECK((*segments)[s - 1].tokens() >= growth * (*segments)[s].tokens());
      }
    }
    CHECK_EQ(evicted.all(), 0u);
    CHECK_EQ(all_of(*segments).size(), 300u);
  }
}

TEST_CASE("Small segments are merged several at a time, so each token is indexed seldom") {
  constexpr std::size_t kLength = 100, kResponses = 256;
  for (std::size_t fan_in : {2u, 4u, 8u}) {
    auto segments = std::make_shared<const Segments>();
    LeftOut evicted;
    std::size_t indexed = 0, most = 0;
    Random random(fan_in);
    for (std::size_t i = 0; i < kResponses; ++i) {
      const std::vector<Response> fresh = {{{}, random.text(kLength, 50), {}, 0}};
      const auto before = segments;
      segments = with_responses(*segments, views_of(fresh), {8}, evicted, {.fan_in = fan_in, .small = SIZE_MAX});
      for (const auto& segment : *segments) {
        if (std::ranges::find(before->list(), segment) == before->end()) indexed += segment->tokens();
      }
      most = std::max(most, segments->size());
    }
    std::size_t levels = 0;
    for (std::size_t n = 1; n < kResponses; n *= fan_in) ++levels;
    CHECK_EQ(evicted.all(), 0u);
    CHECK_EQ(all_of(*segments).size(), kResponses);
    CHECK(most <= levels * (fan_in - 1));
    CHECK(indexed <= levels * kResponses * kLength + kLength);
  }
}

TEST_CASE("Large segments are merged as soon as there are two") {
  auto segments = std::make_shared<const Segments>();
  LeftOut evicted;
  Random random(5);
  const auto add = [&](std::size_t tokens) {
    segments =
        with_responses(*segments, views_of({{{}, random.text(tokens, 50), {}, 0}}), {8}, evicted, {.small = 250});
    return segments->size();
  };
  CHECK_EQ(add(100), 1u);
  CHECK_EQ(add(100), 2u);
  CHECK_EQ(add(100), 1u);  // 300 together
  CHECK_EQ(add(200), 1u);  // less than twice as large: both
  CHECK_EQ(add(200), 2u);
}

TEST_CASE("Merging stops at the largest size") {
  for (std::size_t largest : {0u, 50u, 500u}) {
    auto segments = std::make_shared<const Segments>();
    LeftOut evicted;
    std::size_t merged = 0;
    Random random(largest);
    for (int step = 0; step < 200; ++step) {
      const std::vector<Response> fresh = {{{}, random.text(random.between(1, 40), 50), {}, 0}};
      const std::size_t before = segments->size();
      segments = with_responses(*segments, views_of(fresh), {8}, evicted, {.largest = largest, .fan_in = 2});
      merged += segments->size() <= before;
      for (std::size_t s = 0; s < segments->size(); ++s) {
        const Segment& segment = (*segments)[s];
        CHECK((segment.tokens() <= largest || segment.extents().size() == 1));
      }
      // The newest neighbours stay apart only for one of the two reasons.
      if (segments->size() < 2) continue;
      const std::size_t newer = (*segments)[segments->size() - 1].tokens(),
                        older = (*segments)[segments->size() - 2].tokens();
      CHECK((older >= 2 * newer || older + newer > largest));
    }
    CHECK_EQ(merged > 0, largest > 0);
    CHECK_EQ(evicted.all(), 0u);
    CHECK_EQ(all_of(*segments).size(), 200u);
  }
}

TEST_CASE("Masks survive merging") {
  auto segments = std::make_shared<const Segments>();
  LeftOut evicted;
  for (Token i = 0; i < 8; ++i) {
    const std::vector<Response> fresh = {{{7, 8}, {i, 1, 2}, {1, 0, 1}, i}};
    segments = with_responses(*segments, views_of(fresh), {100}, evicted, {.fan_in = 2});
  }
  CHECK_EQ(segments->size(), 1u);
  for (const Response& r : all_of(*segments)) {
    CHECK_EQ(r.generated, (std::vector<std::uint8_t>{1, 0, 1}));
    CHECK_EQ(r.head, (std::vector<Token>{7, 8}));
  }
}

TEST_CASE("A late response of an old epoch is evicted at once") {
  auto segments = std::make_shared<const Segments>();
  LeftOut evicted;
  for (std::int64_t epoch : {6, 7}) {
    segments = with_responses(*segments, views_of({{{}, {static_cast<Token>(epoch)}, {}, epoch}}), {2}, evicted);
  }
  segments = with_responses(*segments, views_of({{{}, {1}, {}, 1}}), {2}, evicted);
  CHECK_EQ(evicted.epochs, 1u);
  CHECK_EQ(evicted.responses, 0u);
  CHECK_EQ(names(all_of(*segments)), (std::vector<std::int64_t>{6, 7}));
}

// All others are counted as evicted.
TEST_CASE("Segments keep about the newest responses, in order") {
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    const std::size_t most = random.between(1, 40);
    auto segments = std::make_shared<const Segments>();
    LeftOut evicted;
    std::size_t added = 0;
    for (int step = 0; step < 150; ++step) {
      std::vector<Response> fresh(random.between(1, 6));
      for (Response& r : fresh) {
        r.tokens = random.text(random.below(10), 4);
        r.tokens.insert(r.tokens.begin(), static_cast<Token>(added++));
      }
      segments = with_responses(*segments, views_of(fresh), {.epochs = 8, .responses = most}, evicted);
      const std::vector<std::int64_t> kept = names(all_of(*segments));
      CHECK_EQ(kept.size() + evicted.responses, added);
      CHECK(kept.size() >= std::min(most, added));
      CHECK(kept.size() <= 3 * most + 12);
      for (std::size_t i = 0; i < kept.size(); ++i) {
        CHECK_EQ(kept[i], static_cast<std::int64_t>(added - kept.size() + i));
      }
    }
  }
}
