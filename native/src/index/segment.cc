#include "index/segment.h"

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>

namespace histospec {

std::vector<std::uint32_t> Segment::text() const {
  std::vector<std::uint32_t> newest(rows());  // row -> the newest token of its context
  for (std::uint32_t rank = 0; rank < alphabet_.size(); ++rank) {
    std::fill(newest.begin() + first_[rank], newest.begin() + first_[rank + 1], rank);
  }
  std::vector<std::uint32_t> text(rows());
  each_row([&](std::uint32_t row, std::uint32_t position) { text[position - 1] = newest[row]; });
  return text;
}

std::vector<Response> Segment::responses() const {
  const std::vector<std::uint32_t> ranks = text();
  std::vector<bool> hidden(masked_ ? ranks.size() + 1 : 0);
  if (masked_) {
    each_row([&](std::uint32_t row, std::uint32_t i) {
      hidden[i] = rows_[row].next_rank == kSeparator && i < ranks.size() && ranks[i] != kSeparator;
    });
  }
  std::vector<std::uint32_t> row_of(alternatives_.empty() ? 0 : ranks.size() + 1);
  if (!row_of.empty()) each_row([&](std::uint32_t row, std::uint32_t i) { row_of[i] = row; });
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
    if (!row_of.empty()) {
      r.alternatives = pack(r.tokens.size(), [&](std::size_t i) { return alternatives_[row_of[extent.start + i]]; });
    }
    begin = extent.end;
  }
  return out;
}

std::size_t Segment::bytes() const {
  constexpr std::size_t kAllocation = 32;  // overhead of malloc and the shared pointer
  return sizeof(*this) + kAllocation + memory_.bytes();
}

std::uint32_t Segment::rank(Token token) const {
  return slots_[find_slot(token, slots_.size(), [this, token](std::size_t i) {
    return slots_[i] == kSeparator || alphabet_[slots_[i]] == token;
  })];
}

std::uint8_t Segment::epoch_name(std::int64_t epoch) const {
  int name = 0;
  while (name + 1 < epochs_named_ && epochs_[name] > epoch) ++name;
  return static_cast<std::uint8_t>(name);
}

RowGap Segment::find(Tokens context) const {
  RowGap gap = nowhere();
  for (Token token : tail(context)) extend(gap, token);
  return gap;
}

std::optional<std::uint32_t> Segment::continued_nearby(const RowGap& gap, std::uint32_t rank) const {
  constexpr std::uint32_t kNearby = 3;
  return rows_.read([&](auto rows) -> std::optional<std::uint32_t> {
    // At a row with a separator, the token that followed may be hidden, so the rows beyond it tell nothing.
    const std::uint32_t top = gap.row - std::min(gap.row, gap.above > 0 ? kNearby : 0);
    for (std::uint32_t r = gap.row; r > top;) {
      const Row row = rows[--r];
      if (row.next_rank == rank) return row.next_row + 1;
      if (row.next_rank == kSeparator) break;
    }
    const std::uint32_t end = std::min(this->rows(), gap.row + (gap.below > 0 ? kNearby : 0));
    for (std::uint32_t r = gap.row; r < end; ++r) {
      const Row row = rows[r];
      if (row.next_rank == rank) return row.next_row;
      if (row.next_rank == kSeparator) break;
    }
    return {};
  });
}

// The rows of a token are in the order of their previous rows. So the new gap's neighbours are the next rows of the
// nearest rows, on either side of the old gap, that the token followed; and each matches one token more than those.
//
//   1   The token followed a row next to the old gap, so that row's next row is next to the new gap, on the same side.
//       The context lies between it and the row on the other side, so the LCP of these two is the shorter one of their
//       matches. If it is shorter than the known match, it is the other one. If not, the other one may be longer,
//       except where the known one is kMaxOrder, the longest. 1a  The row below the old gap. 1b  The row above it.
//   2   The segment does not have the token, so no row matches.
//   3   Any other row. Its match is the least LCP of the rows between it and the old gap.
//       3a  One of the nearest rows continues with the token, so its next row is a neighbour.
//       3b  None does, so search all rows of the token.
void Segment::extend(RowGap& gap, Token token) const {
  const auto longer = [](std::uint8_t length) { return std::min<std::uint8_t>(length + 1, kMaxOrder); };
  if (gap.below > 0) {  // 1a
    const Row row = rows_[gap.row];
    if (alphabet_[row.next_rank] == token) {
      const std::uint8_t below = longer(gap.below), between = rows_[row.next_row].lcp;
      if (between < below || below == kMaxOrder) {
        gap = {row.next_row, between, below};
        return;
      }
    }
  }
  if (gap.above > 0) {  // 1b
    const Row row = rows_[gap.row - 1];
    if (alphabet_[row.next_rank] == token) {
      const std::uint8_t above = longer(gap.above), between = rows_[row.next_row + 1].lcp;
      if (between < above || above == kMaxOrder) {
        gap = {row.next_row + 1, above, between};
        return;
      }
    }
  }
  const std::uint32_t c = rank(token);
  if (c == kSeparator) {  // 2
    gap = nowhere();
    return;
  }
  const std::uint32_t first = first_[c], last = first_[c + 1];
  const std::optional<std::uint32_t> nearby = continued_nearby(gap, c);                          // 3a
  const std::uint32_t row = nearby ? *nearby : previous_row_.lower_bound(first, last, gap.row);  // 3b
  rows_.prefetch(row);  // while least_lcp() runs
  RowGap moved{row, 0, 0};
  if (row > first) moved.above = longer(rows_.least_lcp(previous_row_[row - 1] + 1, gap.row, gap.above));
  if (row < last) moved.below = longer(rows_.least_lcp(gap.row + 1, previous_row_[row] + 1, gap.below));
  gap = moved;
}

void Segment::check_integrity() const {
  auto require = [](bool holds, const char* invariant) {
    if (!holds) throw std::logic_error(std::string("segment: ") + invariant);
  };
  const std::uint32_t n = rows();
  const std::size_t alphabet = alphabet_.size();
  require(previous_row_.size() == n && first_.size() == alphabet + 1, "sizes differ");
  require(first_[0] == 0 && first_[alphabet] == n, "buckets do not cover the rows");
  for (std::uint32_t c = 0; c < alphabet; ++c) {
    require(first_[c] < first_[c + 1] || n == 0, "a token without rows");
    require(first_[c + 1] <= n, "buckets do not cover the rows");
    if (c == kSeparator) continue;
    require(rank(alphabet_[c]) == c, "the alphabet's hash table misses a token");
    for (std::uint32_t row = first_[c] + 1; row < first_[c + 1]; ++row) {
      require(previous_row_[row - 1] < previous_row_[row], "`previous_row` does not ascend inside a token");
    }
  }
  std::size_t tokens = 0;
  std::uint32_t end = 0;
  std::vector<std::uint16_t> offsets(n + 1);
  std::vector<std::uint8_t> epochs(n + 1);
  for (const Extent& extent : extents_) {
    require(extent.start > end && extent.end >= extent.start && extent.end <= n, "extents overlap");
    for (std::uint32_t i = extent.start; i <= extent.end; ++i) {
      offsets[i] = static_cast<std::uint16_t>(std::min<std::uint32_t>(i - extent.start, UINT16_MAX));
    }
    tokens += extent.end - extent.start;
    const std::uint8_t name = epoch_name(extent.epoch);
    require(name + 1 == Rows::kEpochs ? extent.epoch <= epochs_[name] : extent.epoch == epochs_[name],
            "a row's epoch stands for another epoch");
    std::fill(epochs.begin() + end + 1, epochs.begin() + extent.end + 1, name);
    end = extent.end;
  }
  require(tokens == tokens_ && end == n, "extents do not cover the text");

  std::vector<std::uint32_t> position(n);  // of each row; 0: not reached yet
  std::uint32_t next_row = 0, row_before = last_row_;
  for (std::uint32_t p = n; p > 0; --p) {
    const std::uint32_t row = row_before;
    require(row < n && position[row] == 0, "`previous_row` is not one circle");
    row_before = previous_row_[row];
    position[row] = p;
    require(rows_[row].next_row == next_row, "`next_row` does not lead back");
    require(rows_[row].offset == offsets[p], "a row has a wrong offset");
    require(rows_[row].epoch == epochs[p], "a row has a wrong epoch");
    next_row = row;
  }
  require(row_before == last_row_, "`previous_row` is not one circle");
  const std::vector<std::uint32_t> ranks = text();
  for (std::uint32_t row = 0; row < n; ++row) {
    const std::uint32_t p = position[row], next = p == n ? kSeparator : ranks[p];
    require(rows_[row].next_rank == next || (masked_ && rows_[row].next_rank == kSeparator),
            "a row has a wrong next token");
    int common = 0;
    if (row > 0) {
      const std::uint32_t other = position[row - 1];
      const int limit = static_cast<int>(std::min<std::uint32_t>({p, other, kMaxOrder}));
      while (common < limit && ranks[p - 1 - common] == ranks[other - 1 - common] &&
             ranks[p - 1 - common] != kSeparator) {
        ++common;
      }
    }
    require(rows_[row].lcp == common, "an LCP is wrong");
  }
  require(rows_[n].lcp == 0, "the LCP beyond the last row is not 0");
  require(rows_.sealed(), "the least LCP of a block is wrong");
  require(alternatives_.sealed(), "the directory of the alternatives does not cover them");
}

}  // namespace histospec
