// The noise is that of the sampler. The known answers are those of client/vllm/coupled/noise.py;
// tests/vllm/test_coupled_noise.py has the same table.
#include "draft/noise.h"

#include <bit>
#include <cmath>
#include <map>
#include <utility>

#include "random_text.h"
#include "test.h"

using namespace histospec;
using testing::Random;

TEST_CASE("The contexts of a text count the tokens that follow each pair") {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    std::vector<Token> text;
    for (std::size_t n = random.below(200); n > 0; --n) text.push_back(static_cast<Token>(random.below(5)));
    const std::size_t known = random.below(text.size() + 1);
    const auto token = [&](std::size_t i, std::size_t back) { return i < back ? -1 : text[i - back]; };
    NoiseCounter counter;
    for (std::size_t i = 0; i < known; ++i) counter.push(text[i]);
    NoiseAhead ahead;
    ahead.start(7, counter);
    for (std::size_t i = known; i <= text.size(); ++i) {
      std::uint32_t times = 0;
      for (std::size_t j = 0; j < i; ++j) times += token(j, 2) == token(i, 2) && token(j, 1) == token(i, 1);
      CHECK_EQ(ahead.next().before, token(i, 2));
      CHECK_EQ(ahead.next().last, token(i, 1));
      CHECK_EQ(ahead.next().times, times);
      if (i < text.size()) ahead.push(text[i]);
    }
  }
}

TEST_CASE("The noise of known contexts") {
  struct Known {
    std::int64_t seed;
    NoiseContext context;
    std::array<Token, kMaxCandidates> tokens;
    std::array<std::uint32_t, kMaxCandidates> bits;  // of the noise
  };
  const Known known[] = {
      {0, {-1, -1, 0}, {0, 1, 255, 256}, {0x3ed0dc70, 0x3f1f7b1d, 0x408c3adb, 0xbe81af39}},
      {1, {5, 7, 0}, {3, 511, 512, 1023}, {0xbdac3b4f, 0x3fa5604c, 0x3fafd6d9, 0x3fb4a0d0}},
      {-1, {INT32_MAX, 0, 3}, {1024, 1280, 151935, 7}, {0x4006e441, 0x3f9bd528, 0x3f97fd8d, 0x3f8f32d8}},
      {(1LL << 62) + 12345, {40, 41, 1000}, {767, 768, 2047, 50000}, {0xbdc9ad2f, 0x4008f39d, 0xbfa4b57d, 0x3e250c52}},
      {INT64_MIN, {9, 9, UINT32_MAX}, {1, 2, 3, 4}, {0x3ed2454f, 0x3c31c3fd, 0xbf6a03b3, 0x400d66d7}},
  };
  for (const Known& k : known) {
    CAPTURE(k.seed);
    std::array<float, kMaxCandidates> noise;
    gumbel_noise(k.seed, k.context, k.tokens, noise);
    for (std::size_t i = 0; i < noise.size(); ++i) CHECK_EQ(std::bit_cast<std::uint32_t>(noise[i]), k.bits[i]);
  }
}

// tests/support/position_noise.py has the same table, and says where it is from.
TEST_CASE("The noise of known positions is that of vLLM's kernel") {
  struct Known {
    std::int64_t seed;
    std::uint32_t position;
    std::array<Token, kMaxCandidates> tokens;
    std::array<double, kMaxCandidates> noise;
  };
  const Known known[] = {
      {0, 0, {0, 1, 255, 256}, {0.352945, 6.058697, 0.001109, 0.867154}},
      {1, 5, {3, 511, 512, 1023}, {-1.154724, 0.079496, -0.571010, 0.494154}},
      {-1, INT32_MAX, {1024, 1280, 151935, 7}, {0.583205, 0.597412, -0.252356, 0.857050}},
      {(1LL << 62) + 12345, 1000, {767, 768, 2047, 50000}, {0.202814, 2.376513, 1.662062, 0.546896}},
      {INT64_MIN, 40960, {1, 2, 3, 4}, {1.992754, -0.208652, 0.283350, 2.528480}},
  };
  for (const Known& k : known) {
    CAPTURE(k.seed);
    std::array<float, kMaxCandidates> noise;
    position_noise(k.seed, k.position, k.tokens, noise);
    for (std::size_t i = 0; i < noise.size(); ++i) CHECK_LT(std::abs(noise[i] - k.noise[i]), 2e-6);
    NoiseAhead ahead;
    CHECK_FALSE(ahead.known());
    ahead.start(k.seed, std::int64_t{k.position} - 2);
    ahead.push(5);
    ahead.push(6);
    std::array<float, kMaxCandidates> two_further;
    ahead.of(k.tokens, two_further);
    CHECK(noise == two_further);
  }
}

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
