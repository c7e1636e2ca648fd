// Counts of pairs, against a plain map.
#include <map>
#include <utility>

#include "draft/noise.h"
#include "random_text.h"
#include "test.h"

using namespace histospec;
using testing::Random;

TEST_CASE("Counts of pairs are those of a plain map") {
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    PairCounts counts;
    std::map<std::pair<Token, Token>, std::uint32_t> plain;
    CHECK_EQ(counts.of(1, 2), 0);
    CHECK_EQ(counts.bytes(), 0);
    const std::size_t tokens = random.between(1, 300);
    const auto token = [&] { return static_cast<Token>(random.below(tokens)) - 1; };  // -1: before the text
    for (int i = 0; i < 3000; ++i) {
      const Token a = token(), b = token();
      counts.prefetch(a, b);
      counts.add(a, b);
      ++plain[{a, b}];
      CHECK_EQ(counts.of(a, b), (plain[{a, b}]));
    }
    for (const auto& [pair, count] : plain) CHECK_EQ(counts.of(pair.first, pair.second), count);
    for (int i = 0; i < 300; ++i) {
      const Token a = token(), b = token();
      CHECK_EQ(counts.of(a, b), (plain.contains({a, b}) ? plain[{a, b}] : 0));
    }
    CHECK(counts.bytes() <= std::max<std::size_t>(2048, 4 * 8 * plain.size()));
  }
}

TEST_CASE("Hardly any two pairs of a long text are counted together") {
  PairCounts counts;
  constexpr Token kRows = 300, kColumns = 300;
  for (Token a = 0; a < kRows; ++a) {
    for (Token b = 0; b < kColumns; ++b) counts.add(a, 1000 * b);
  }
  int together = 0;
  for (Token a = 0; a < kRows; ++a) {
    for (Token b = 0; b < kColumns; ++b) together += counts.of(a, 1000 * b) != 1;
  }
  CHECK(together <= 20);  // 90,000 pairs; of random bits one pair of them would be the same
}
