#include "segment.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace histospec {

std::vector<std::uint32_t> Segment::text() const {
  const std::size_t n = next_.size();
  std::vector<std::uint32_t> newest(n);  // row -> the newest token of its context
  for (std::uint32_t rank = 0; rank < alphabet_.size(); ++rank) {
    std::fill(newest.begin() + first_[rank], newest.begin() + first_[rank + 1], rank);
  }
  std::vector<std::uint32_t> text(n);
  for (std::uint32_t row = last_row_, i = static_cast<std::uint32_t>(n); i-- > 0; row = from_[row])
    text[i] = newest[row];
  return text;
}

std::vector<Response> Segment::responses() const {
  const std::vector<std::uint32_t> ranks = text();
  std::vector<bool> hidden(masked_ ? ranks.size() + 1 : 0);
  for (std::uint32_t row = 0; masked_ && row < next_.size(); ++row) {
    const std::uint32_t i = position_[row];
    hidden[i] = next_[row] == kSeparator && i < ranks.size() && ranks[i] != kSeparator;
  }
  std::vector<Response> out;
  out.reserve(extents_.size());
  std::uint32_t begin = 0;
  for (const Extent& extent : extents_) {
    Response& r = out.emplace_back();
    r.epoch = extent.epoch;
    for (std::uint32_t i = begin + 1; i < extent.start; ++i) r.head.push_back(alphabet_[ranks[i]]);
    r.tokens.reserve(extent.end - extent.start);
    for (std::uint32_t i = extent.start; i < extent.end; ++i) r.tokens.push_back(alphabet_[ranks[i]]);
    if (masked_ &&
        std::find(hidden.begin() + extent.start, hidden.begin() + extent.end, true) != hidden.begin() + extent.end) {
      r.generated.resize(r.tokens.size());
      for (std::size_t i = 0; i < r.tokens.size(); ++i) r.generated[i] = !hidden[extent.start + i];
    }
    begin = extent.end;
  }
  return out;
}

std::size_t Segment::bytes() const {
  constexpr std::size_t kAllocation = 32;  // what malloc and the shared pointer add
  return sizeof(*this) + kAllocation + memory_.bytes();
}

std::uint32_t Segment::rank(Token token) const {
  return slots_[find_slot(token, slots_.size(), [this, token](std::size_t i) {
    return slots_[i] == kSeparator || alphabet_[slots_[i]] == token;
  })];
}

Place Segment::find(Tokens context) const {
  Place place = nowhere();
  for (Token token : tail(context)) extend(place, token);
  return place;
}

void Segment::extend(Place& place, Token token) const {
  // Where a row next to the place goes on with `token`, so does the place, to the same side of the row that it leads
  // to. What it shares with the row beyond follows from what those two rows share, unless that is as much.
  if (place.below > 0 && alphabet_[next_[place.row]] == token) {
    const std::uint32_t row = to_[place.row];
    const int below = std::min(place.below + 1, kMaxOrder), between = shared_[row];
    if (between < below || below == kMaxOrder) {
      place = {row, static_cast<std::uint8_t>(between), static_cast<std::uint8_t>(below)};
      return;
    }
  } else if (place.above > 0 && alphabet_[next_[place.row - 1]] == token) {
    const std::uint32_t row = to_[place.row - 1] + 1;
    const int above = std::min(place.above + 1, kMaxOrder), between = shared_[row];
    if (between < above || above == kMaxOrder) {
      place = {row, static_cast<std::uint8_t>(above), static_cast<std::uint8_t>(between)};
      return;
    }
  }
  const std::uint32_t c = rank(token);
  if (c == kSeparator) {
    place = nowhere();
  } else {
    search(place, c);
  }
}

void Segment::search(Place& place, std::uint32_t rank) const {
  const std::uint32_t first = first_[rank], last = first_[rank + 1];
  const std::uint32_t row = from_.lower_bound(first, last, place.row);
  // The neighbours of the new place continue the nearest rows on either side of the old one that the token followed.
  const auto longer = [](int shared) { return static_cast<std::uint8_t>(std::min(shared + 1, kMaxOrder)); };
  Place moved{row, 0, 0};
  if (row > first) moved.above = longer(shared_.least(from_[row - 1] + 1, place.row, place.above));
  if (row < last) moved.below = longer(shared_.least(place.row + 1, from_[row] + 1, place.below));
  place = moved;
}

Segment::Near Segment::neighbours(const Place& place, std::span<Neighbour, 2 * kNear> found) const {
  Near near{0, 0};
  std::uint32_t row = place.row;
  for (int shared = place.above; near.above < kNear && shared > 0; shared = std::min(shared, shared_[row])) {
    found[near.above++] = {--row, static_cast<std::uint8_t>(shared)};
  }
  row = place.row;
  for (int shared = place.below; near.below < kNear && shared > 0; shared = std::min(shared, shared_[row])) {
    found[near.above + near.below++] = {row++, static_cast<std::uint8_t>(shared)};
  }
  return near;
}

std::int64_t Segment::offset(std::uint32_t row) const {
  const std::uint32_t position = position_[row];
  std::uint32_t j = extent_of_[position / kBlock];
  while (extents_[j].end < position) ++j;
  return static_cast<std::int64_t>(position) - extents_[j].start;
}

void Segment::check_integrity() const {
  auto require = [](bool holds, const char* invariant) {
    if (!holds) throw std::logic_error(std::string("segment: ") + invariant);
  };
  const std::size_t n = next_.size(), alphabet = alphabet_.size();
  require(position_.size() == n && from_.size() == n && to_.size() == n && first_.size() == alphabet + 1,
          "sizes differ");
  require(first_[0] == 0 && first_[alphabet] == n, "buckets do not cover the rows");
  std::vector<bool> seen(n + 1), reached(n);
  for (std::uint32_t row = 0; row < n; ++row) {
    require(position_[row] >= 1 && position_[row] <= n && !seen[position_[row]], "positions are not a permutation");
    seen[position_[row]] = true;
    require(from_[row] < n && !reached[from_[row]], "`from` is not a permutation");
    reached[from_[row]] = true;
    require(to_[from_[row]] == row, "`to` does not lead back");
    const std::uint32_t before = position_[row] == 1 ? static_cast<std::uint32_t>(n) : position_[row] - 1;
    require(position_[from_[row]] == before, "`from` does not lead one token back");
  }
  for (std::uint32_t c = 0; c < alphabet; ++c) {
    require(first_[c] < first_[c + 1] || n == 0, "a token without rows");
    require(first_[c + 1] <= n, "buckets do not cover the rows");
    for (std::uint32_t row = first_[c]; row < first_[c + 1]; ++row) {
      const std::uint32_t came = next_[from_[row]];
      require(came == c || (masked_ && came == kSeparator), "what followed a context is not what stands there");
    }
    if (c != kSeparator) {
      require(rank(alphabet_[c]) == c, "the alphabet's hash table misses a token");
      for (std::uint32_t row = first_[c] + 1; row < first_[c + 1]; ++row) {
        require(from_[row - 1] < from_[row], "`from` does not ascend inside a token");
      }
    }
  }
  const std::vector<std::uint32_t> ranks = text();
  for (std::uint32_t row = 0; row <= n; ++row) {
    int common = 0;
    if (row > 0 && row < n) {
      const std::uint32_t a = position_[row - 1], b = position_[row];
      const int limit = static_cast<int>(std::min<std::uint32_t>({a, b, kMaxOrder}));
      while (common < limit && ranks[a - 1 - common] == ranks[b - 1 - common] && ranks[a - 1 - common] != kSeparator) {
        ++common;
      }
    }
    require(shared_[row] == common, "neighbours share another number of tokens");
  }
  require(shared_.sealed(), "the least of a block is not the least");
  for (std::uint32_t block = 0, j = 0; block < extent_of_.size(); ++block) {
    while (j + 1 < extents_.size() && extents_[j].end < block * kBlock) ++j;
    require(extent_of_[block] == j, "a block names another response");
  }
  std::size_t tokens = 0;
  std::uint32_t end = 0;
  for (const Extent& extent : extents_) {
    require(extent.start > end && extent.end >= extent.start && extent.end <= n, "extents overlap");
    tokens += extent.end - extent.start;
    end = extent.end;
  }
  require(tokens == tokens_ && end == n, "extents do not cover the text");
}

}  // namespace histospec
