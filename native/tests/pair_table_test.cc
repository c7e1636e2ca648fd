#include "pair_table.h"

#include <map>

#include "allocations.h"
#include "check.h"
#include "random_text.h"

using namespace histospec;
using testing::Random;

namespace {

using Model = std::map<std::pair<Token, Token>, std::pair<std::uint32_t, std::uint32_t>>;

void check_same(const PairTable& table, const Model& model) {
  CHECK_EQ(table.size(), model.size());
  for (const auto& [pair, place] : model) {
    const PairTable::Place found = table.find(pair.first, pair.second);
    CHECK_EQ(found.text, place.first);
    CHECK_EQ(found.end, place.second);
  }
}

Token random_token(Random& random, std::size_t alphabet) {
  // Small ones, the largest ones, and ones that differ only far up: pairs must not be taken for each other.
  const auto token = static_cast<Token>(random.below(alphabet));
  return random.one_in(3) ? INT32_MAX - token : random.one_in(3) ? token << 20 : token;
}

}  // namespace

TEST(nothing_is_there_at_first) {
  const PairTable table;
  CHECK_EQ(table.find(1, 2).text, PairTable::kNoText);
  CHECK_EQ(table.size(), 0u);
  CHECK_EQ(table.bytes(), 0u);
}

TEST(against_a_map) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    check::subject = "seed " + std::to_string(seed);
    Random random(seed);
    PairTable table;
    Model model;
    const std::size_t alphabet = random.between(1, 200);
    for (int round = 0; round < 60; ++round) {
      const std::size_t more = random.below(random.one_in(10) ? 600 : 20);
      table.reserve(more);
      for (std::size_t i = 0; i < more; ++i) {
        const Token a = random_token(random, alphabet), b = random_token(random, alphabet);
        const bool known = model.contains({a, b});
        PairTable::Place& place = table(a, b);
        CHECK_EQ(place.text == PairTable::kNoText, !known);
        place = {static_cast<std::uint32_t>(random.below(5)), static_cast<std::uint32_t>(random.below(1 << 30))};
        model[{a, b}] = {place.text, place.end};
      }
      for (int i = 0; i < 20; ++i) {
        const Token a = random_token(random, alphabet), b = random_token(random, alphabet);
        if (!model.contains({a, b})) CHECK_EQ(table.find(a, b).text, PairTable::kNoText);
      }
      if (random.one_in(8)) {
        // Forgets the places of one text, and changes those of another.
        const auto gone = static_cast<std::uint32_t>(random.below(5)), changed = (gone + 1) % 5;
        std::size_t seen = 0;
        table.keep([&](PairTable::Place& place) {
          ++seen;
          if (place.text == changed) place.end += 1;
          if (place.text == gone) place.text = PairTable::kNoText;
        });
        CHECK_EQ(seen, model.size());
        std::erase_if(model, [&](const auto& entry) { return entry.second.first == gone; });
        for (auto& [pair, place] : model) place.second += place.first == changed;
      }
      if (round % 5 == 0) check_same(table, model);
    }
    check_same(table, model);
  }
}

TEST(a_pair_is_not_its_reverse) {
  PairTable table;
  table.reserve(4);
  table(1, 2) = {7, 1};
  table(2, 1) = {8, 2};
  CHECK_EQ(table.find(1, 2).text, 7u);
  CHECK_EQ(table.find(2, 1).text, 8u);
  CHECK_EQ(table.find(1, 1).text, PairTable::kNoText);
}

// Only reserve() and keep() allocate, and where there is room reserve() does not either.
TEST(room_that_is_there_is_not_made_again) {
  const std::size_t before = allocations::held();
  PairTable table;
  table.reserve(1000);
  const std::size_t bytes = table.bytes();
  CHECK_EQ(bytes, allocations::held() - before);
  allocations::Failure failure(0);
  for (Token token = 0; token < 1000; ++token) {
    table.reserve(1);
    table(token, token + 1) = {0, 1};
  }
  CHECK_EQ(table.size(), 1000u);
  CHECK_EQ(table.bytes(), bytes);
}

TEST(without_memory_nothing_changes) {
  Random random(1);
  PairTable table;
  Model model;
  table.reserve(500);
  for (Token token = 0; token < 500; ++token) {
    table(token % 20, token) = {static_cast<std::uint32_t>(token % 3), static_cast<std::uint32_t>(token)};
    model[{token % 20, token}] = {static_cast<std::uint32_t>(token % 3), static_cast<std::uint32_t>(token)};
  }
  int thrown = 0;
  for (const bool keeping : {false, true}) {
    allocations::Failure failure(0);
    try {
      if (keeping) {
        table.keep([](PairTable::Place& place) { place.text = PairTable::kNoText; });
      } else {
        table.reserve(100000);
      }
    } catch (const std::bad_alloc&) {
      ++thrown;
    }
  }
  CHECK_EQ(thrown, 2);
  check_same(table, model);
}

int main() { return check::main(); }
