#include "index/alternatives.h"

#include <algorithm>
#include <cmath>

namespace histospec {

const std::array<float, 256> Alternatives::kProbabilities = [] {
  std::array<float, 256> t;
  for (std::size_t level = 0; level < t.size(); ++level)
    t[level] = std::exp(-static_cast<float>(level) / kLevelsPerNat);
  return t;
}();

std::string PackedAlternatives::fault(std::span<const std::uint8_t> packed, std::size_t tokens) {
  if (packed.empty()) return {};
  const std::string has = "has " + std::to_string(packed.size()) + " bytes";
  const std::size_t counts = (tokens + 3) / 4;
  if (packed.size() < counts) {
    return has + ", must have at least " + std::to_string(counts) + " for " + std::to_string(tokens) + " tokens";
  }
  std::size_t expected = counts;
  for (std::size_t i = 0; i < 4 * counts; ++i) {
    const int count = packed[i / 4] >> 2 * (i % 4) & 3;
    if (count > 0 && i >= tokens) return "has alternatives behind its " + std::to_string(tokens) + " tokens";
    expected += Alternatives::bytes(count);
  }
  if (expected != packed.size()) return has + ", must have " + std::to_string(expected) + " for its counts";
  return {};
}

Alternatives PackedAlternatives::previous() {
  if (left_ == 0) return {};
  --left_;
  const int count = packed_[left_ / 4] >> 2 * (left_ % 4) & 3;
  end_ -= Alternatives::bytes(count);
  return {count, packed_.data() + end_};
}

void AlternativeRows::seal() {
  std::uint64_t begin = 0;
  for (Block64& block : blocks_) {
    block.begin = begin;
    for (const std::uint64_t counts : block.counts) begin += bytes(counts);
  }
}

void AlternativeRows::set_group(std::uint32_t row, Alternatives alternatives) {
  const auto from = alternatives.group();
  std::ranges::copy(from, groups_.begin() + ((*this)[row].group().data() - groups_.data()));
}

bool AlternativeRows::sealed() const {
  std::uint64_t begin = 0;
  for (const Block64& block : blocks_) {
    if (block.begin != begin) return false;
    for (const std::uint64_t counts : block.counts) begin += bytes(counts);
  }
  return begin == groups_.size();
}

}  // namespace histospec
