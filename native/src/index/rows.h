// The rows of a segment: 7 bytes each, or 11 if numbers exceed 65,535, and one byte for every 8 rows.
//
// A lookup needs all numbers of a row, so they lie together: reading a row touches one cache line, and its nearest
// neighbours lie in the same line or the next. The LCP of two rows is the least LCP of the neighbours between them.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <span>

#include "histospec/types.h"
#include "index/block.h"

namespace histospec {

struct Row {
  std::uint32_t next_rank;  // the rank that followed this context
  std::uint32_t next_row;   // the row of this context followed by that rank (LF-mapping)
  std::uint16_t offset;     // tokens of the response before it: 0 inside the head, 65,535 means as many or more
  std::uint8_t lcp;         // match length of the contexts of this row and the one above
  std::uint8_t epoch;       // of its response, among the newest of the segment: 0 ... kEpochs - 1

  bool operator==(const Row&) const = default;
};

class Rows {
 public:
  static constexpr int kEpochs = 4;

  Rows() = default;
  // `largest`: the largest next_rank or next_row.
  Rows(Layout& layout, std::size_t rows, std::size_t largest)
      : size_(rows),
        wide_(largest > UINT16_MAX),
        data_(layout.take((rows + 1) * (wide_ ? kWide : kNarrow) + 1)),  // a narrow one is read as 8 bytes
        blocks_(layout.take_array<std::uint8_t>(rows / kBlock)) {}

  std::size_t size() const { return size_; }
  // Calls use(rows) with a view of the right width, so that a loop tests the width once and not for every row.
  template <typename Use>
  decltype(auto) read(Use use) const {
    return wide_ ? use(Wide{data_}) : use(Narrow{data_});
  }
  // Row size() exists: its lcp is 0, and its other numbers mean nothing. Not through `read`: GCC inlines that in fewer
  // places, and a step takes 2 % more instructions.
  Row operator[](std::uint32_t r) const { return wide_ ? Wide{data_}[r] : Narrow{data_}[r]; }
  // Prefetches row r and its neighbours.
  void prefetch(std::uint32_t r) const {
    const std::byte* const at = data_ + r * (wide_ ? kWide : kNarrow);
    __builtin_prefetch(at - 40);
    __builtin_prefetch(at + 40);
  }
  void set(std::uint32_t r, const Row& row) {
    const auto both = static_cast<std::uint8_t>(row.epoch << kLcpBits | row.lcp);
    if (wide_) {
      std::byte* const at = data_ + r * kWide;
      store(at, row.next_rank), store(at + 4, row.next_row), store(at + 8, row.offset), store(at + 10, both);
    } else {
      std::byte* const at = data_ + r * kNarrow;
      store(at, static_cast<std::uint16_t>(row.next_rank)), store(at + 2, static_cast<std::uint16_t>(row.next_row));
      store(at + 4, row.offset), store(at + 6, both);
    }
  }
  // Call this after the last set() and before least_lcp().
  void seal() {
    for (std::uint32_t b = 0; b < blocks_.size(); ++b) blocks_[b] = least_lcp_of_block(b);
  }
  bool sealed() const {
    for (std::uint32_t b = 0; b < blocks_.size(); ++b) {
      if (blocks_[b] != least_lcp_of_block(b)) return false;
    }
    return true;
  }

  // The least LCP of the rows [first, last), or `bound` if that is less. Reads whole blocks first, because after them
  // single rows are seldom needed.
  std::uint8_t least_lcp(std::uint32_t first, std::uint32_t last, std::uint8_t bound) const {
    const std::uint32_t first_block = (first + kBlock - 1) / kBlock, last_block = last / kBlock;
    if (first_block > last_block) return bound > 0 ? least_lcp_of(first, last, bound) : bound;
    for (std::uint32_t b = first_block; b < last_block && bound > 0;) {
      const std::uint32_t end = std::min(last_block, b + 64);
      for (; b < end; ++b) bound = std::min(bound, blocks_[b]);
    }
    const auto may_be_less = [&](std::uint32_t b) { return b >= blocks_.size() || blocks_[b] < bound; };
    const std::uint32_t begin = first_block * kBlock, end = last_block * kBlock;
    if (first < begin && may_be_less(first_block - 1)) bound = least_lcp_of(first, begin, bound);
    if (end < last && may_be_less(last_block)) bound = least_lcp_of(end, last, bound);
    return bound;
  }

 private:
  struct Narrow {
    Row operator[](std::uint32_t r) const {
      const auto row = load<std::uint64_t>(data + r * kNarrow);
      const auto both = static_cast<std::uint8_t>(row >> 48);
      return {static_cast<std::uint16_t>(row), static_cast<std::uint16_t>(row >> 16),
              static_cast<std::uint16_t>(row >> 32), lcp_of(both), epoch_of(both)};
    }
    const std::byte* data;
  };
  struct Wide {
    Row operator[](std::uint32_t r) const {
      const std::byte* const at = data + r * kWide;
      const auto both = load<std::uint8_t>(at + 10);
      return {load<std::uint32_t>(at), load<std::uint32_t>(at + 4), load<std::uint16_t>(at + 8), lcp_of(both),
              epoch_of(both)};
    }
    const std::byte* data;
  };
  static_assert(std::endian::native == std::endian::little);
  static constexpr std::size_t kNarrow = 7, kWide = 11;
  static constexpr std::uint32_t kBlock = 8;

  // The LCP and the epoch share one byte.
  static constexpr int kLcpBits = 6;
  static_assert(kMaxOrder < 1 << kLcpBits && kEpochs <= 1 << (8 - kLcpBits));
  static constexpr std::uint8_t lcp_of(std::uint8_t both) { return both & ((1 << kLcpBits) - 1); }
  static constexpr std::uint8_t epoch_of(std::uint8_t both) { return both >> kLcpBits; }

  template <typename T>
  static T load(const std::byte* at) {
    T value;
    std::memcpy(&value, at, sizeof(T));
    return value;
  }
  template <typename T>
  static void store(std::byte* at, T value) {
    std::memcpy(at, &value, sizeof(T));
  }
  std::uint8_t least_lcp_of(std::uint32_t first, std::uint32_t last, std::uint8_t bound) const {
    const std::size_t stride = wide_ ? kWide : kNarrow;
    const std::byte* at = data_ + first * stride + stride - 1;
    for (std::uint32_t r = first; r < last; ++r, at += stride) {
      bound = std::min(bound, lcp_of(static_cast<std::uint8_t>(*at)));
    }
    return bound;
  }
  std::uint8_t least_lcp_of_block(std::uint32_t b) const {
    return least_lcp_of(b * kBlock, (b + 1) * kBlock, UINT8_MAX);
  }

  std::size_t size_ = 0;
  bool wide_ = false;
  std::byte* data_ = nullptr;
  std::span<std::uint8_t> blocks_;  // the least LCP of kBlock rows each
};

}  // namespace histospec
