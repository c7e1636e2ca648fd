// How many tokens the contexts of neighbouring rows share: the array that turns sorted rows into a tree.
//
// One byte a row, at [r] for the rows r - 1 and r, and one for every 64 rows, their least. What two rows far apart
// share is the least of what the neighbours between them share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "block.h"

namespace histospec {

class SharedLengths {
 public:
  SharedLengths() = default;
  SharedLengths(Layout& layout, std::size_t rows)
      : bytes_(layout.take_array<std::uint8_t>(rows + 1)), blocks_(layout.take_array<std::uint8_t>(rows / kBlock)) {}

  void set(std::uint32_t row, int length) { bytes_[row] = static_cast<std::uint8_t>(length); }
  int operator[](std::uint32_t row) const { return bytes_[row]; }
  // After the last set(): makes least() ready.
  void seal() {
    for (std::uint32_t b = 0; b < blocks_.size(); ++b) blocks_[b] = least_byte(at(b * kBlock), kBlock, 0xff);
  }

  bool sealed() const {
    for (std::uint32_t b = 0; b < blocks_.size(); ++b) {
      if (blocks_[b] != least_byte(at(b * kBlock), kBlock, 0xff)) return false;
    }
    return true;
  }

  // The least of [first, last), and of `bound`.
  int least(std::uint32_t first, std::uint32_t last, int bound) const {
    if (last - first <= 2 * kBlock) return least_byte(at(first), last - first, bound);
    const std::uint32_t first_block = (first + kBlock - 1) / kBlock, last_block = last / kBlock;
    bound = least_byte(at(first), first_block * kBlock - first, bound);
    bound = least_byte(blocks_.data() + first_block, last_block - first_block, bound);
    return least_byte(at(last_block * kBlock), last - last_block * kBlock, bound);
  }

 private:
  static constexpr std::uint32_t kBlock = 64;

  const std::uint8_t* at(std::uint32_t row) const { return bytes_.data() + row; }
  static std::uint8_t least_byte(const std::uint8_t* bytes, std::size_t n, int bound) {
    auto least = static_cast<std::uint8_t>(bound);
    for (std::size_t i = 0; i < n; ++i) least = std::min(least, bytes[i]);
    return least;
  }

  std::span<std::uint8_t> bytes_;   // one more than rows: nothing is shared beyond the last
  std::span<std::uint8_t> blocks_;  // of kBlock rows each
};

}  // namespace histospec
