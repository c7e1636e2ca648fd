// The alternatives of a response: at some of its positions, the tokens that the policy found most probable beside the
// token that the response has, with their probabilities.
//
// A position has at most kMost alternatives, and most have none: the sampler gives only tokens of 5 % and more.
// Callers give and get the alternatives of a response of n tokens in one piece:
//
//     counts   2 bits per token, four tokens per byte, the first in the lowest bits: how many alternatives it has
//     groups   for each position that has some: the level of the response's own token, 1 byte; then its alternatives,
//              4 bytes each, little-endian: token << 8 | level
//
// A level is -16 ln p, rounded, at most 255. Stores and messages use the same bytes.
//
// A segment keeps the groups in the order of its rows, because a lookup comes from a row. A directory leads there: a
// block for every 64 rows holds their counts and where their groups begin, so the group of a row takes the bits before
// it and no search. Costs 0.375 bytes per row, 1 byte per position that has alternatives, and 4 bytes for each of
// these. A segment without alternatives has no directory.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "histospec/types.h"
#include "index/block.h"

namespace histospec {

// The alternatives at one position, without owning them. O(1), and no allocation.
class Alternatives {
 public:
  static constexpr int kMost = 3;
  static constexpr std::uint32_t kTokens = 1u << 24;  // the largest token is one less
  static constexpr float kLevelsPerNat = 16;

  Alternatives() = default;
  Alternatives(int count, const std::uint8_t* group) : group_(group), count_(count) {}

  // How many there are; 0 if the position has none, and then nothing else may be asked.
  int count() const { return count_; }
  // The probability of the token that the response has at this position.
  float sampled_probability() const { return kProbabilities[group_[0]]; }
  // The i-th alternative, and its probability.
  Token token(int i) const { return static_cast<Token>(entry(i) >> 8); }
  float probability(int i) const { return kProbabilities[entry(i) & 0xff]; }

  // The bytes of a group with this many alternatives.
  static std::size_t bytes(int count) { return count == 0 ? 0 : 1 + 4 * static_cast<std::size_t>(count); }
  std::span<const std::uint8_t> group() const { return {group_, bytes(count_)}; }

 private:
  static const std::array<float, 256> kProbabilities;  // by level

  std::uint32_t entry(int i) const {
    std::uint32_t value;
    std::memcpy(&value, group_ + 1 + 4 * i, sizeof(value));
    return value;
  }

  const std::uint8_t* group_ = nullptr;
  int count_ = 0;
};

// The alternatives of one response in one piece, read from its last token to its first.
class PackedAlternatives {
 public:
  // What is wrong with the alternatives of a response of this many tokens; empty if they can be read. No bytes: none.
  static std::string fault(std::span<const std::uint8_t> packed, std::size_t tokens);

  // `packed` has no fault.
  PackedAlternatives(std::span<const std::uint8_t> packed, std::size_t tokens)
      : packed_(packed), left_(packed.empty() ? 0 : tokens), end_(packed.size()) {}
  // Returns those of the token before the one of the last call; none before the first token.
  Alternatives previous();
  // The bytes of all groups.
  std::size_t group_bytes() const { return packed_.empty() ? 0 : packed_.size() - (left_ + 3) / 4; }

 private:
  std::span<const std::uint8_t> packed_;
  std::size_t left_;
  std::size_t end_;  // of the next group
};

// Returns those of a response in one piece; at(i) are those of its token i. Empty if no position has any.
template <typename At>
std::vector<std::uint8_t> pack(std::size_t tokens, At at) {
  const std::size_t counts = (tokens + 3) / 4;
  std::vector<std::uint8_t> packed(counts);
  for (std::size_t i = 0; i < tokens; ++i) {
    const Alternatives here = at(i);
    packed[i / 4] |= static_cast<std::uint8_t>(here.count() << 2 * (i % 4));
    packed.insert(packed.end(), here.group().begin(), here.group().end());
  }
  if (packed.size() == counts) packed.clear();
  return packed;
}

// Those of all rows of a segment.
class AlternativeRows {
 public:
  AlternativeRows() = default;
  // Without `group_bytes`, no row has alternatives and there is no directory.
  AlternativeRows(Layout& layout, std::size_t rows, std::size_t group_bytes)
      : blocks_(layout.take_array<Block64>(group_bytes == 0 ? 0 : rows / kRows + 1)),
        groups_(layout.take_array<std::uint8_t>(group_bytes)) {}

  bool empty() const { return blocks_.empty(); }
  Alternatives operator[](std::uint32_t row) const {
    if (blocks_.empty()) return {};
    const Block64& block = blocks_[row / kRows];
    const std::uint32_t word = row % kRows / kRowsOfWord, bit = 2 * (row % kRowsOfWord);
    const int count = static_cast<int>(block.counts[word] >> bit & 3);
    if (count == 0) return {};
    std::uint64_t at = block.begin + bytes(block.counts[word] & ((std::uint64_t{1} << bit) - 1));
    if (word == 1) at += bytes(block.counts[0]);
    return {count, &groups_[at]};
  }

  // To fill it: set_count() for the rows that have some, then seal(), then set_group() for the same rows.
  void set_count(std::uint32_t row, int count) {
    blocks_[row / kRows].counts[row % kRows / kRowsOfWord] |= static_cast<std::uint64_t>(count)
                                                              << 2 * (row % kRowsOfWord);
  }
  void seal();
  void set_group(std::uint32_t row, Alternatives alternatives);
  // Whether the directory covers exactly the groups.
  bool sealed() const;

 private:
  static constexpr std::uint32_t kRows = 64, kRowsOfWord = 32;
  struct Block64 {
    std::uint64_t begin;  // of its groups
    std::array<std::uint64_t, 2> counts;
  };

  // The bytes of the groups with these counts.
  static std::uint64_t bytes(std::uint64_t counts) {
    constexpr std::uint64_t kLow = 0x5555555555555555;
    const std::uint64_t low = counts & kLow, high = counts >> 1 & kLow;
    return std::popcount(low | high) + 4 * (std::popcount(low) + 2 * std::popcount(high));
  }

  std::span<Block64> blocks_;
  std::span<std::uint8_t> groups_;
};

}  // namespace histospec
