#include "shared_lengths.h"

#include "check.h"
#include "histospec/types.h"
#include "random_text.h"

using namespace histospec;
using testing::Random;

namespace {

// In memory of its own, which a segment would give it.
class Sealed {
 public:
  explicit Sealed(const std::vector<int>& lengths) {
    const auto place = [&](Layout layout) {
      shared_ = SharedLengths(layout, lengths.size());
      return layout.size();
    };
    block_ = Block(place(Layout(nullptr)));
    place(Layout(block_.data()));
    for (std::uint32_t row = 0; row < lengths.size(); ++row) shared_.set(row, lengths[row]);
    shared_.seal();
  }
  const SharedLengths* operator->() const { return &shared_; }
  const SharedLengths& operator*() const { return shared_; }

 private:
  Block block_;
  SharedLengths shared_;
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

TEST(gives_back_what_was_set) {
  for (std::size_t rows : {0u, 1u, 63u, 64u, 65u, 1000u}) {
    Random random(rows);
    const std::vector<int> lengths = random_lengths(random, rows);
    const Sealed shared(lengths);
    for (std::uint32_t row = 0; row < rows; ++row) CHECK_EQ((*shared)[row], lengths[row]);
    CHECK_EQ((*shared)[static_cast<std::uint32_t>(rows)], 0);  // nothing is shared beyond the last
  }
}

TEST(the_least_of_every_piece) {
  for (std::size_t rows : {1u, 63u, 64u, 65u, 128u, 129u, 191u, 192u, 193u, 200u}) {
    check::subject = std::to_string(rows) + " rows";
    Random random(rows);
    const std::vector<int> lengths = random_lengths(random, rows);
    const Sealed shared(lengths);
    for (std::uint32_t first = 0; first <= rows; ++first) {
      for (std::uint32_t last = first; last <= rows; ++last) {
        CHECK_EQ(shared->least(first, last, kMaxOrder), naive_least(lengths, first, last, kMaxOrder));
      }
    }
  }
}

TEST(the_least_of_long_pieces) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    check::subject = "seed " + std::to_string(seed);
    Random random(seed);
    const std::size_t rows = random.between(300, 5000);
    const std::vector<int> lengths = random_lengths(random, rows);
    const Sealed shared(lengths);
    for (int i = 0; i < 200; ++i) {
      const auto first = static_cast<std::uint32_t>(random.below(rows + 1));
      const auto last = static_cast<std::uint32_t>(random.between(first, rows));
      const auto bound = static_cast<int>(random.below(kMaxOrder + 1));
      CHECK_EQ(shared->least(first, last, bound), naive_least(lengths, first, last, bound));
    }
  }
}

// A single small one, at every distance from the edges of blocks.
TEST(no_row_is_overlooked) {
  constexpr std::size_t kRows = 64 * 5 + 17;
  for (std::size_t small = 0; small < kRows; ++small) {
    std::vector<int> lengths(kRows, kMaxOrder);
    lengths[small] = 3;
    const Sealed shared(lengths);
    for (std::uint32_t first : {0u, 1u, 40u, 64u, 65u}) {
      for (std::uint32_t last : {256u, 300u, 320u, 321u, static_cast<unsigned>(kRows)}) {
        CHECK_EQ(shared->least(first, last, kMaxOrder), first <= small && small < last ? 3 : kMaxOrder);
      }
    }
  }
}

int main() { return check::main(); }
