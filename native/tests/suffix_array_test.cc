#include "index/suffix_array.h"

#include "random_text.h"
#include "reference_model.h"
#include "test.h"

using namespace histospec;
using testing::Random;

namespace {

void compare(const std::vector<std::uint32_t>& text) {
  std::vector<std::uint32_t> order(text.size());
  suffix_array(text, text.empty() ? 1 : *std::ranges::max_element(text) + 1, order);
  CHECK_EQ(order, testing::naive_suffix_array(text));
}

std::vector<std::uint32_t> random_text(Random& random, std::size_t size, std::size_t alphabet) {
  const std::vector<Token> text = random.text(size, alphabet);
  return {text.begin(), text.end()};
}

}  // namespace

TEST_CASE("Every text of up to six letters is sorted") {
  for (std::size_t size = 0; size <= 6; ++size) {
    std::size_t texts = 1;
    for (std::size_t i = 0; i < size; ++i) texts *= 3;
    for (std::size_t n = 0; n < texts; ++n) {
      std::vector<std::uint32_t> text(size);
      for (std::size_t i = 0, rest = n; i < size; ++i, rest /= 3) text[i] = static_cast<std::uint32_t>(rest % 3);
      compare(text);
    }
  }
}

TEST_CASE("Random texts are sorted") {
  for (std::uint64_t seed = 0; seed < 600; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    compare(random_text(random, random.below(301), random.between(1, 6)));
  }
}

TEST_CASE("Long texts are sorted") {
  for (std::uint32_t alphabet : {2u, 40u, 5000u}) {
    Random random(alphabet);
    std::vector<std::uint32_t> text(10000);
    for (std::uint32_t& letter : text) letter = static_cast<std::uint32_t>(random.below(alphabet));
    compare(text);
  }
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    compare(random_text(random, 2000, 4));
  }
}

TEST_CASE("Texts of one letter are sorted") {
  for (std::size_t size : {1u, 2u, 3u, 1000u}) compare(std::vector<std::uint32_t>(size, 3));
}

TEST_CASE("Texts that use few letters of their alphabet are sorted") {
  const std::vector<std::uint32_t> text = {7, 900, 7, 3, 900, 7};
  std::vector<std::uint32_t> order(text.size());
  suffix_array(text, 100000, order);
  CHECK_EQ(order, testing::naive_suffix_array(text));
}
