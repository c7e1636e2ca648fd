// The rows of a segment: 7 bytes each, or 11 where numbers beyond 65,535 are needed, and one for every 8 rows.
//
// What is asked of a row is asked together, so it lies together: a look at a row is one line of memory, and at its
// nearest neighbours the same line or the next. What two rows far apart share is the least of what the neighbours
// between them share.
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
  std::uint32_t next;    // the rank that followed this context
  std::uint32_t to;      // the row of this context and what followed it
  std::uint16_t offset;  // tokens of the response before it: 0 inside the head, 65,535 means as many or more
  std::uint8_t shared;   // tokens that the contexts of this row and the one above have in common
  std::uint8_t epoch;    // of its response, among the newest of the segment: 0 ... kEpochs - 1

  bool operator==(const Row&) const = default;
};

class Rows {
 public:
  static constexpr int kEpochs = 4;

  Rows() = default;
  // `largest`: of all that next and to will be.
  Rows(Layout& layout, std::size_t rows, std::size_t largest)
      : size_(rows),
        wide_(largest > UINT16_MAX),
        data_(layout.take((rows + 1) * (wide_ ? kWide : kNarrow) + 1)),  // a narrow one is read as 8 bytes
        blocks_(layout.take_array<std::uint8_t>(rows / kBlock)) {}

  std::size_t size() const { return size_; }
  // use(rows), which are these, of the width that they have: so that loops need not ask for every row.
  template <typename Use>
  decltype(auto) read(Use use) const {
    return wide_ ? use(Wide{data_}) : use(Narrow{data_});
  }
  // Row size() shares nothing with the one above it; the rest of it means nothing.
  Row operator[](std::uint32_t r) const {
    return read([r](auto rows) { return rows[r]; });
  }
  // Row r is about to be looked at, and those around it.
  void prefetch(std::uint32_t r) const {
    const std::byte* const at = data_ + r * (wide_ ? kWide : kNarrow);
    __builtin_prefetch(at - 40);
    __builtin_prefetch(at + 40);
  }
  void set(std::uint32_t r, const Row& row) {
    const auto both = static_cast<std::uint8_t>(row.epoch << kSharedBits | row.shared);
    if (wide_) {
      std::byte* const at = data_ + r * kWide;
      store(at, row.next), store(at + 4, row.to), store(at + 8, row.offset), store(at + 10, both);
    } else {
      std::byte* const at = data_ + r * kNarrow;
      store(at, static_cast<std::uint16_t>(row.next)), store(at + 2, static_cast<std::uint16_t>(row.to));
      store(at + 4, row.offset), store(at + 6, both);
    }
  }
  // After the last set(): makes least() ready.
  void seal() {
    for (std::uint32_t b = 0; b < blocks_.size(); ++b) blocks_[b] = least_of_block(b);
  }
  bool sealed() const {
    for (std::uint32_t b = 0; b < blocks_.size(); ++b) {
      if (blocks_[b] != least_of_block(b)) return false;
    }
    return true;
  }

  // The least `shared` of the rows [first, last), and of `bound`. Whole blocks first: with what they say, hardly ever a
  // row has to be looked at.
  std::uint8_t least(std::uint32_t first, std::uint32_t last, std::uint8_t bound) const {
    const std::uint32_t first_block = (first + kBlock - 1) / kBlock, last_block = last / kBlock;
    if (first_block > last_block) return bound > 0 ? least_of(first, last, bound) : bound;
    for (std::uint32_t b = first_block; b < last_block && bound > 0;) {
      const std::uint32_t end = std::min(last_block, b + 64);
      for (; b < end; ++b) bound = std::min(bound, blocks_[b]);
    }
    const auto may_be_less = [&](std::uint32_t b) { return b >= blocks_.size() || blocks_[b] < bound; };
    const std::uint32_t begin = first_block * kBlock, end = last_block * kBlock;
    if (first < begin && may_be_less(first_block - 1)) bound = least_of(first, begin, bound);
    if (end < last && may_be_less(last_block)) bound = least_of(end, last, bound);
    return bound;
  }

 private:
  struct Narrow {
    Row operator[](std::uint32_t r) const {
      const auto row = load<std::uint64_t>(data + r * kNarrow);
      const auto both = static_cast<std::uint8_t>(row >> 48);
      return {static_cast<std::uint16_t>(row), static_cast<std::uint16_t>(row >> 16),
              static_cast<std::uint16_t>(row >> 32), shared_of(both), epoch_of(both)};
    }
    const std::byte* data;
  };
  struct Wide {
    Row operator[](std::uint32_t r) const {
      const std::byte* const at = data + r * kWide;
      const auto both = load<std::uint8_t>(at + 10);
      return {load<std::uint32_t>(at), load<std::uint32_t>(at + 4), load<std::uint16_t>(at + 8), shared_of(both),
              epoch_of(both)};
    }
    const std::byte* data;
  };
  static_assert(std::endian::native == std::endian::little);
  static constexpr std::size_t kNarrow = 7, kWide = 11;
  static constexpr std::uint32_t kBlock = 8;

  // The epoch stands in the bits of a byte that what is shared leaves free.
  static constexpr int kSharedBits = 6;
  static_assert(kMaxOrder < 1 << kSharedBits && kEpochs <= 1 << (8 - kSharedBits));
  static constexpr std::uint8_t shared_of(std::uint8_t both) { return both & ((1 << kSharedBits) - 1); }
  static constexpr std::uint8_t epoch_of(std::uint8_t both) { return both >> kSharedBits; }

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
  std::uint8_t least_of(std::uint32_t first, std::uint32_t last, std::uint8_t bound) const {
    const std::size_t stride = wide_ ? kWide : kNarrow;
    const std::byte* shared = data_ + first * stride + stride - 1;
    for (std::uint32_t r = first; r < last; ++r, shared += stride) {
      bound = std::min(bound, shared_of(static_cast<std::uint8_t>(*shared)));
    }
    return bound;
  }
  std::uint8_t least_of_block(std::uint32_t b) const { return least_of(b * kBlock, (b + 1) * kBlock, UINT8_MAX); }

  std::size_t size_ = 0;
  bool wide_ = false;
  std::byte* data_ = nullptr;
  std::span<std::uint8_t> blocks_;  // of kBlock rows each: the least that they share
};

}  // namespace histospec
