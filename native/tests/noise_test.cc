// The noise is that of the sampler. The known answers are those of client/vllm/coupled/noise.py;
// tests/vllm/test_coupled_noise.py has the same table.
#include "draft/noise.h"

#include <bit>
#include <map>

#include "random_text.h"
#include "test.h"

using namespace histospec;
using testing::Random;

TEST_CASE("The places of a text count the tokens that follow each pair") {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    std::vector<Token> text;
    for (std::size_t n = random.below(200); n > 0; --n) text.push_back(static_cast<Token>(random.below(5)));
    const std::size_t known = random.below(text.size() + 1);
    const auto token = [&](std::size_t i, std::size_t back) { return i < back ? -1 : text[i - back]; };
    PlaceCounter counter;
    for (std::size_t i = 0; i < known; ++i) counter.push(text[i]);
    PlacesAhead ahead(counter);
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
