#include "index/rows.h"

#include "histospec/types.h"
#include "random_text.h"
#include "test.h"

using namespace histospec;
using testing::Random;

namespace {

constexpr std::size_t kNarrow = UINT16_MAX, kWide = std::size_t{UINT16_MAX} + 1;  // the largest number in a row

// In memory of its own, which a segment would give it.
class Held {
 public:
  Held(std::size_t rows, std::size_t largest) {
    const auto place = [&](Layout layout) {
      rows_ = Rows(layout, rows, largest);
      return layout.size();
    };
    block_ = Block(place(Layout(nullptr)));
    place(Layout(block_.data()));
  }
  explicit Held(const std::vector<int>& lengths, std::size_t largest = kNarrow) : Held(lengths.size(), largest) {
    for (std::uint32_t row = 0; row < lengths.size(); ++row) {
      rows_.set(row, {row, 0, 0, static_cast<std::uint8_t>(lengths[row])});
    }
    rows_.seal();
  }
  Rows* operator->() { return &rows_; }
  Rows& operator*() { return rows_; }

 private:
  Block block_;
  Rows rows_;
};

std::vector<int> random_lengths(Random& random, std::size_t rows) {
  std::vector<int> lengths(rows);
  // Mostly large, so that the few small ones decide, wherever they are.
  const std::size_t rare = random.between(1, 100);
  for (int& length : lengths) {
    length = random.one_in(rare) ? static_cast<int>(random.below(kMaxOrder)) : kMaxOrder;
  }
  return lengths;
}

int naive_least(const std::vector<int>& lengths, std::size_t first, std::size_t last, int bound) {
  for (std::size_t i = first; i < last; ++i) bound = std::min(bound, lengths[i]);
  return bound;
}

}  // namespace

TEST_CASE("Rows return what was set") {
  for (std::size_t largest : {kNarrow, kWide}) {
    for (std::size_t size : {0u, 1u, 7u, 8u, 9u, 1000u}) {
      Random random(size);
      Held rows(size, largest);
      std::vector<Row> set(size);
      for (std::uint32_t r = 0; r < size; ++r) {
        const auto number = [&] {
          return static_cast<std::uint32_t>(random.one_in(4) ? largest : random.below(largest));
        };
        set[r] = {number(), number(), static_cast<std::uint16_t>(random.below(UINT16_MAX + 1)),
                  static_cast<std::uint8_t>(random.below(kMaxOrder + 1)),
                  static_cast<std::uint8_t>(random.below(Rows::kEpochs))};
        rows->set(r, set[r]);
      }
      CHECK_EQ(rows->size(), size);
      for (std::uint32_t r = 0; r < size; ++r) CHECK((*rows)[r] == set[r]);
      CHECK_EQ((*rows)[static_cast<std::uint32_t>(size)].lcp, 0);  // no row is beyond the last
    }
  }
}

TEST_CASE("The least LCP is right for every range") {
  for (std::size_t rows : {1u, 63u, 64u, 65u, 128u, 129u, 191u, 192u, 193u, 200u}) {
    CAPTURE(rows);
    Random random(rows);
    const std::vector<int> lengths = random_lengths(random, rows);
    Held held(lengths, random.one_in(2) ? kNarrow : kWide);
    for (std::uint32_t first = 0; first <= rows; ++first) {
      for (std::uint32_t last = first; last <= rows; ++last) {
        CHECK_EQ(int{held->least_lcp(first, last, kMaxOrder)}, naive_least(lengths, first, last, kMaxOrder));
      }
    }
  }
}

TEST_CASE("The least LCP is right for long ranges and any bound") {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    const std::size_t rows = random.between(300, 5000);
    const std::vector<int> lengths = random_lengths(random, rows);
    Held held(lengths, random.one_in(2) ? kNarrow : kWide);
    for (int i = 0; i < 200; ++i) {
      const auto first = static_cast<std::uint32_t>(random.below(rows + 1));
      const auto last = static_cast<std::uint32_t>(random.between(first, rows));
      const auto bound = static_cast<int>(random.below(kMaxOrder + 1));
      CHECK_EQ(int{held->least_lcp(first, last, static_cast<std::uint8_t>(bound))},
               naive_least(lengths, first, last, bound));
    }
  }
}

// With a single small LCP, at every distance from the edges of blocks.
TEST_CASE("The least LCP overlooks no row, wherever it lies in its block") {
  constexpr std::size_t kRows = 64 * 5 + 17;
  for (std::size_t small = 0; small < kRows; ++small) {
    std::vector<int> lengths(kRows, kMaxOrder);
    lengths[small] = 3;
    Held held(lengths);
    for (std::uint32_t first : {0u, 1u, 40u, 64u, 65u}) {
      for (std::uint32_t last : {256u, 300u, 320u, 321u, static_cast<unsigned>(kRows)}) {
        CHECK_EQ(int{held->least_lcp(first, last, kMaxOrder)}, first <= small && small < last ? 3 : kMaxOrder);
      }
    }
  }
}
