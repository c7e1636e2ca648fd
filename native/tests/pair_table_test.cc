#include "live/pair_table.h"

#include <map>

#include "allocations.h"
#include "random_text.h"
#include "test.h"

using namespace histospec;
using testing::Random;

namespace {

using Model = std::map<std::pair<Token, Token>, PairTable::ChainIndex>;

void check_same(const PairTable& table, const Model& model) {
  CHECK_EQ(table.size(), model.size());
  for (const auto& [pair, place] : model) CHECK_EQ(table.find(pair.first, pair.second), place);
}

Token random_token(Random& random, std::size_t alphabet) {
  // Small ones, the largest ones, and ones that differ only far up: pairs must not be taken for each other.
  const auto token = static_cast<Token>(random.below(alphabet));
  return random.one_in(3) ? INT32_MAX - token : random.one_in(3) ? token << 20 : token;
}

}  // namespace

TEST_CASE("A new table is empty and holds no memory") {
  const PairTable table;
  CHECK_EQ(table.find(1, 2), PairTable::kNone);
  CHECK_EQ(table.size(), 0u);
  CHECK_EQ(table.bytes(), 0u);
}

TEST_CASE("The table agrees with a std::map") {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    PairTable table;
    Model model;
    // Some tables grow over many pages, and shrink to nothing in between.
    const std::size_t alphabet = random.between(1, 400), rounds = seed % 10 == 0 ? 400 : 60;
    for (std::size_t round = 0; round < rounds; ++round) {
      for (std::size_t i = random.below(random.one_in(10) ? 3000 : 20); i > 0; --i) {
        const Token a = random_token(random, alphabet), b = random_token(random, alphabet);
        PairTable::ChainIndex& place = table(a, b);
        CHECK_EQ(place != PairTable::kNone, model.contains({a, b}));
        model[{a, b}] = place = static_cast<PairTable::ChainIndex>(random.between(1, UINT32_MAX));
      }
      const std::size_t one_in = random.one_in(20) ? 1 : random.between(2, 50);
      for (auto pair = model.begin(); pair != model.end();) {
        if (!random.one_in(one_in)) {
          ++pair;
          continue;
        }
        table.erase(pair->first.first, pair->first.second);
        pair = model.erase(pair);
      }
      for (int i = 0; i < 20; ++i) {
        const Token a = random_token(random, alphabet), b = random_token(random, alphabet);
        if (!model.contains({a, b})) CHECK_EQ(table.find(a, b), PairTable::kNone);
      }
      if (round % 8 == 0) check_same(table, model);
    }
    check_same(table, model);
  }
}

// As in text, where a few tokens follow many.
TEST_CASE("A lookup reads few slots, even if many pairs have a token in common") {
  for (const bool first : {true, false}) {
    PairTable table;
    std::size_t probes = 0;
    const Token often = 8, seldom = 4000;
    for (Token a = 0; a < often; ++a) {
      for (Token b = 0; b < seldom; ++b) (first ? table(a, b) : table(b, a)) = 1;
    }
    for (Token a = 0; a < often; ++a) {
      for (Token b = 0; b < seldom; ++b) probes += first ? table.probes(a, b) : table.probes(b, a);
    }
    CHECK(probes < 2 * table.size());
  }
}

TEST_CASE("Pairs that a client makes for the multiplier of a hash without a key are spread") {
  PairTable table;
  Model model;
  std::uint64_t inverse = 1;  // of 0x9e3779b97f4a7c15, modulo 2^64, by Newton's iteration
  for (int i = 0; i < 6; ++i) inverse *= 2 - 0x9e3779b97f4a7c15ull * inverse;
  for (std::uint64_t n = 0; model.size() < 20000; ++n) {
    const std::uint64_t key = ((std::uint64_t{0xabcdef} << 40) + n) * inverse;  // alike in their first 40 bits
    const auto a = static_cast<Token>(key >> 32), b = static_cast<Token>(key & UINT32_MAX);
    if (a < 0 || b < 0) continue;
    model[{a, b}] = table(a, b) = static_cast<PairTable::ChainIndex>(n + 1);
  }
  check_same(table, model);
  std::size_t probes = 0;
  for (const auto& [pair, place] : model) probes += table.probes(pair.first, pair.second);
  CHECK(probes < 2 * table.size());
  CHECK(table.bytes() < 20000 * 100);
}

TEST_CASE("An insertion without memory changes nothing") {
  Random random(1);
  PairTable table;
  Model model;
  int failures = 0;
  for (std::size_t i = 0; i < 20000; ++i) {
    const auto a = static_cast<Token>(random.below(1 << 20)), b = static_cast<Token>(random.below(1 << 20));
    bool done = false;
    for (long n = 0; !done; ++n) {
      try {
        const allocations::Failure failure(n);
        table(a, b) = static_cast<PairTable::ChainIndex>(i + 1);
        done = true;
      } catch (const std::bad_alloc&) {
        ++failures;
        if (failures % 16 == 0) check_same(table, model);
      }
    }
    model[{a, b}] = static_cast<PairTable::ChainIndex>(i + 1);
  }
  check_same(table, model);
  CHECK(failures > 20);
}

TEST_CASE("bytes() is what the table allocated") {
  const std::size_t before = allocations::held();
  Random random(2);
  PairTable table;
  for (PairTable::ChainIndex i = 1; i < 100'000; ++i) {
    table(static_cast<Token>(random.below(1 << 20)), static_cast<Token>(random.below(1 << 20))) = i;
  }
  CHECK_EQ(table.bytes(), allocations::held() - before);
}
