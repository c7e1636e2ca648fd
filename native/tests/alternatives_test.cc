#include "index/alternatives.h"

#include <cmath>
#include <map>
#include <optional>

#include "index/segments.h"
#include "random_text.h"
#include "test.h"

using namespace histospec;
using testing::Random;

namespace {

struct Other {
  Token token;
  int level;

  bool operator==(const Other&) const = default;
};

// What is kept at one place, as plain as it can be.
struct Kept {
  int sampled = 0;
  std::vector<Other> others;

  bool operator==(const Kept&) const = default;
};

Kept read(Alternatives place) {
  Kept kept;
  if (place.count() == 0) return kept;
  kept.sampled = static_cast<int>(std::lround(-std::log(place.sampled_probability()) * Alternatives::kLevelsPerNat));
  for (int i = 0; i < place.count(); ++i) {
    const double level = -std::log(place.probability(i)) * Alternatives::kLevelsPerNat;
    kept.others.push_back({place.token(i), static_cast<int>(std::lround(level))});
  }
  return kept;
}

// Writes the format from its description, byte by byte.
std::vector<std::uint8_t> packed_of(const std::vector<Kept>& places) {
  std::vector<std::uint8_t> bytes((places.size() + 3) / 4);
  for (std::size_t i = 0; i < places.size(); ++i) {
    bytes[i / 4] = static_cast<std::uint8_t>(bytes[i / 4] + (places[i].others.size() << 2 * (i % 4)));
  }
  for (const Kept& place : places) {
    if (place.others.empty()) continue;
    bytes.push_back(static_cast<std::uint8_t>(place.sampled));
    for (const Other& other : place.others) {
      bytes.push_back(static_cast<std::uint8_t>(other.level));
      for (int shift = 0; shift < 24; shift += 8) bytes.push_back(static_cast<std::uint8_t>(other.token >> shift));
    }
  }
  return bytes;
}

std::vector<Kept> random_places(Random& random, std::size_t tokens) {
  std::vector<Kept> places(tokens);
  const std::size_t rare = random.between(1, 6);
  for (Kept& place : places) {
    if (!random.one_in(rare)) continue;
    place.sampled = static_cast<int>(random.below(256));
    place.others.resize(random.between(1, Alternatives::kMost));
    for (Other& other : place.others) {
      other.token = static_cast<Token>(random.one_in(4) ? Alternatives::kTokens - 1 : random.below(9));
      other.level = static_cast<int>(random.below(256));
    }
  }
  return places;
}

struct Written {
  Response response;
  std::vector<Kept> places;  // one per token; empty: it has no alternatives
};

Written random_response(Random& random, std::int64_t epoch) {
  Written written;
  Response& r = written.response;
  r.head = random.text(random.below(40), 3);
  r.tokens = random.text(random.below(150), random.between(1, 4));
  r.epoch = epoch;
  if (random.one_in(3)) return written;
  written.places = random_places(random, r.tokens.size());
  r.alternatives = packed_of(written.places);
  if (r.alternatives.size() == (r.tokens.size() + 3) / 4) written.places.clear(), r.alternatives.clear();
  return written;
}

std::vector<ResponseView> views_of(const std::vector<Written>& all) {
  std::vector<ResponseView> views;
  for (const Written& w : all) views.push_back(w.response.view());
  return views;
}

std::shared_ptr<const Segment> build(const std::vector<Written>& all) { return Segment::build(views_of(all)); }

// Follows a response token by token: wherever its context is long enough to stand at one row alone, that row must have
// the alternatives that the response was written with.
int check_lookups(const Segment& segment, const std::vector<Written>& all) {
  std::map<std::vector<Token>, int> contexts;  // how many places have this context of kMaxOrder tokens, or a whole one
  const auto context_of = [](const Response& r, std::size_t i) {
    std::vector<Token> text(tail(r.head).begin(), tail(r.head).end());
    text.insert(text.end(), r.tokens.begin(), r.tokens.begin() + static_cast<std::ptrdiff_t>(i));
    const Tokens last = tail(text);
    return std::vector<Token>(last.begin(), last.end());
  };
  for (const Written& w : all) {
    for (std::size_t i = 0; i <= w.response.tokens.size(); ++i) ++contexts[context_of(w.response, i)];
  }
  int looked_up = 0;
  for (const Written& w : all) {
    for (std::size_t i = 0; i < w.response.tokens.size(); ++i) {
      const std::vector<Token> context = context_of(w.response, i);
      if (context.size() < kMaxOrder || contexts[context] > 1) continue;
      std::optional<Kept> found;
      const RowGap place = segment.find(context);
      if (place.depth() == kMaxOrder) found = read(segment.alternatives(place.nearest_row()));
      CHECK(found.has_value());
      if (found) CHECK_EQ(*found == (w.places.empty() ? Kept() : w.places[i]), true);
      ++looked_up;
    }
  }
  return looked_up;
}

void check_restored(const Segment& segment, std::span<const Written> all) {
  const std::vector<Response> back = segment.responses();
  CHECK_EQ(back.size(), all.size());
  for (std::size_t j = 0; j < back.size(); ++j) CHECK_EQ(back[j].alternatives, all[j].response.alternatives);
  segment.check_integrity();
}

}  // namespace

TEST_CASE("a segment keeps the alternatives of every place, and restores them") {
  Random random(1);
  int looked_up = 0;
  for (int round = 0; round < 300; ++round) {
    std::vector<Written> all(random.below(7));
    for (Written& w : all) w = random_response(random, 0);
    const auto segment = build(all);
    looked_up += check_lookups(*segment, all);
    check_restored(*segment, all);
  }
  CHECK(looked_up > 1000);
}

TEST_CASE("merged and evicted segments keep exactly the alternatives of their responses") {
  Random random(2);
  for (int round = 0; round < 40; ++round) {
    const Window window{static_cast<int>(random.between(1, 3)), random.between(3, 12)};
    auto segments = std::make_shared<const Segments>();
    std::vector<Written> all;
    for (std::int64_t step = 0; step < 12; ++step) {
      std::vector<Written> fresh(random.between(1, 3));
      for (Written& w : fresh) w = random_response(random, step / 2);
      LeftOut evicted;
      segments = with_responses(*segments, views_of(fresh), window, evicted);
      all.insert(all.end(), fresh.begin(), fresh.end());
      std::size_t kept = 0;
      for (const auto& segment : *segments) kept += segment->extents().size();
      std::span<const Written> rest(all.end() - static_cast<std::ptrdiff_t>(kept), all.end());
      for (const auto& segment : *segments) {
        check_restored(*segment, rest.first(segment->extents().size()));
        rest = rest.subspan(segment->extents().size());
      }
    }
  }
}

TEST_CASE("the ledger's bytes grow by the alternatives, and by nothing without") {
  Written plain;
  for (Token token = 0; token < 6400; ++token) plain.response.tokens.push_back(token % 60);
  Written rich = plain;
  std::vector<Kept> places(6400);
  for (std::size_t i = 0; i < places.size(); i += 4) places[i] = {8, {{5, 20}, {6, 30}}};
  rich.response.alternatives = packed_of(places);
  const std::size_t without = build({plain})->bytes(), with = build({rich})->bytes();
  const std::size_t groups = 1600 * 9, directory = 6401 / 64 * 24;
  CHECK(with >= without + groups + directory);
  CHECK(with <= without + groups + directory + 4096);  // whole pages
}

TEST_CASE("alternatives that do not fit their response are named") {
  const std::vector<Kept> places = {{}, {3, {{7, 20}}}, {}, {}, {1, {{2, 9}, {3, 10}, {4, 11}}}};
  std::vector<std::uint8_t> packed = packed_of(places);
  CHECK_EQ(PackedAlternatives::fault(packed, 5), "");
  CHECK_EQ(PackedAlternatives::fault({}, 5), "");
  CHECK_EQ(PackedAlternatives::fault(packed, 4), "has 20 bytes, must have 6 for its counts");
  CHECK_EQ(PackedAlternatives::fault(packed, 100), "has 20 bytes, must have at least 25 for 100 tokens");
  packed[1] |= 4;  // of the sixth token
  CHECK_EQ(PackedAlternatives::fault(packed, 5), "has alternatives behind its 5 tokens");
  packed[1] &= 3;
  packed.pop_back();
  CHECK_EQ(PackedAlternatives::fault(packed, 5), "has 19 bytes, must have 20 for its counts");
}
