#include "segment.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "suffix_array.h"

namespace histospec {
namespace {

constexpr std::size_t kMaxText = std::size_t{1} << 31;
// Counting by scanning is faster up to here (a vectorised pass over at most 1 KiB), by searching beyond.
constexpr std::uint32_t kScanRows = 512;

std::uint32_t hash(Token token) { return static_cast<std::uint32_t>(token) * 2654435769u; }

std::size_t slot_of(Token token, std::size_t slots) { return (static_cast<std::uint64_t>(hash(token)) * slots) >> 32; }

Tokens tail(Tokens head) { return head.size() > kMaxOrder ? head.last(kMaxOrder) : head; }

}  // namespace

std::shared_ptr<const Segment> Segment::build(std::span<const ResponseView> responses) {
  std::shared_ptr<Segment> segment(new Segment);
  const std::vector<std::uint32_t> text = segment->rank_text(responses);
  segment->sort_rows(text);
  segment->mask(responses);
  return segment;
}

std::vector<std::uint32_t> Segment::rank_text(std::span<const ResponseView> responses) {
  std::size_t n = 0;
  for (const ResponseView& r : responses) n += 1 + tail(r.head).size() + r.tokens.size();
  if (n >= kMaxText) throw std::length_error("segment: " + std::to_string(n) + " tokens are more than 2^31 - 1");

  std::vector<std::uint32_t> text;
  text.reserve(n);
  alphabet_ = {-1};
  slots_.assign(64, 0);
  auto append = [&](Token token) {
    std::size_t slot = slot_of(token, slots_.size());
    while (slots_[slot] != 0 && alphabet_[slots_[slot]] != token) slot = slot + 1 == slots_.size() ? 0 : slot + 1;
    if (slots_[slot] == 0) {
      slots_[slot] = static_cast<std::uint32_t>(alphabet_.size());
      alphabet_.push_back(token);
      text.push_back(slots_[slot]);
      if (alphabet_.size() * 2 > slots_.size()) {
        slots_.resize(slots_.size() * 2);
        hash_alphabet();
      }
    } else {
      text.push_back(slots_[slot]);
    }
  };
  extents_.reserve(responses.size());
  for (const ResponseView& r : responses) {
    text.push_back(kSeparator);
    for (Token token : tail(r.head)) append(token);
    const auto start = static_cast<std::uint32_t>(text.size());
    for (Token token : r.tokens) append(token);
    extents_.push_back({start, static_cast<std::uint32_t>(text.size()), r.epoch});
    tokens_ += r.tokens.size();
  }
  alphabet_.shrink_to_fit();
  extent_of_ = Words(text.size() / kBlock + 1, extents_.size());
  for (std::uint32_t block = 0, j = 0; block < extent_of_.size(); ++block) {
    while (j + 1 < extents_.size() && extents_[j].end < block * kBlock) ++j;
    extent_of_.set(block, j);
  }
  return text;
}

void Segment::hash_alphabet() {
  std::fill(slots_.begin(), slots_.end(), 0);
  for (std::uint32_t rank = 1; rank < alphabet_.size(); ++rank) {
    std::size_t slot = slot_of(alphabet_[rank], slots_.size());
    while (slots_[slot] != 0) slot = slot + 1 == slots_.size() ? 0 : slot + 1;
    slots_[slot] = rank;
  }
}

// The text is a circle: its first separator also follows its last token. Then every position has a context and every
// token has a row, and `from` is a permutation. The sort knows no circle, which shows in one place: position 1, with
// nothing before its separator, sorts first, wherever the whole text (position n, from which it comes) sorts.
void Segment::sort_rows(std::span<const std::uint32_t> text) {
  const auto n = static_cast<std::uint32_t>(text.size());
  const auto alphabet = static_cast<std::uint32_t>(alphabet_.size());
  const std::size_t largest = std::max(n, alphabet);
  next_ = Words(n, largest);
  position_ = Words(n, largest);
  from_ = Words(n, largest);
  first_ = Words(alphabet + 1, largest);
  if (n == 0) {
    first_.set(0, 0), first_.set(1, 0);
    return;
  }
  std::vector<std::uint32_t> order(n);
  {
    const std::vector<std::uint32_t> reversed(text.rbegin(), text.rend());
    suffix_array(reversed, alphabet, order);
  }
  for (std::uint32_t row = 0; row < n; ++row) {
    const std::uint32_t position = n - order[row];  // 1 … n; position n is the separator at 0 again
    position_.set(row, position);
    next_.set(row, position == n ? kSeparator : text[position]);
    if (position == n) last_row_ = row;
  }
  std::vector<std::uint32_t> cursor(alphabet + 1, 0);
  for (std::uint32_t c : text) ++cursor[c + 1];
  for (std::uint32_t c = 0; c < alphabet; ++c) cursor[c + 1] += cursor[c];
  for (std::uint32_t c = 0; c <= alphabet; ++c) first_.set(c, cursor[c]);
  from_.set(cursor[kSeparator]++, last_row_);
  for (std::uint32_t row = 0; row < n; ++row) {
    if (row != last_row_) from_.set(cursor[next_[row]]++, row);
  }
}

// Tool and user turns are context: nothing may be drafted from them, so what "followed" there is a separator. The
// tokens themselves stay in the order of the rows.
void Segment::mask(std::span<const ResponseView> responses) {
  std::vector<bool> hidden;
  for (std::size_t j = 0; j < responses.size(); ++j) {
    const auto& generated = responses[j].generated;
    for (std::size_t i = 0; i < generated.size(); ++i) {
      if (generated[i]) continue;
      hidden.resize(next_.size() + 1);
      hidden[extents_[j].start + i] = true;
      masked_ = true;
    }
  }
  for (std::uint32_t row = 0; masked_ && row < next_.size(); ++row) {
    if (hidden[position_[row]]) next_.set(row, kSeparator);
  }
}

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
  constexpr std::size_t kAllocation = 16;  // what malloc adds to each of them
  return sizeof(*this) + 8 * kAllocation + next_.bytes() + position_.bytes() + from_.bytes() + first_.bytes() +
         extent_of_.bytes() + alphabet_.capacity() * sizeof(Token) + slots_.capacity() * sizeof(slots_[0]) +
         extents_.capacity() * sizeof(Extent);
}

std::uint32_t Segment::rank(Token token) const {
  std::size_t slot = slot_of(token, slots_.size());
  while (slots_[slot] != 0 && alphabet_[slots_[slot]] != token) slot = slot + 1 == slots_.size() ? 0 : slot + 1;
  return slots_[slot];
}

Ladder Segment::find(Tokens context) const {
  Ladder ladder;
  for (Token token : tail(context)) extend(ladder, token);
  return ladder;
}

void Segment::extend(Ladder& ladder, Token token) const {
  const std::uint32_t c = rank(token);
  if (c == kSeparator) {
    ladder.depth = 0;
    return;
  }
  // Order 1 is the bucket of the token; order k + 1 is what of order k was followed by it. Written over the old ladder
  // from the shallow end, one order behind.
  std::uint32_t low = first_[c], high = first_[c + 1];
  int depth = 0;
  const int deepest = std::min(ladder.depth, kMaxOrder - 1);
  std::uint32_t before_low = UINT32_MAX, before_high = 0;  // of the order last looked at
  while (low < high) {
    const std::uint32_t old_low = depth < ladder.depth ? ladder.low[depth] : 0;
    const std::uint32_t old_high = depth < ladder.depth ? ladder.high[depth] : 0;
    ladder.low[depth] = low;
    ladder.high[depth] = high;
    ++depth;
    if (depth > deepest) break;
    // Long contexts often stand in the same places as shorter ones: then so do they with one token more.
    if (old_low != before_low || old_high != before_high) {
      low = from_.lower_bound(low, high, old_low);
      high = from_.lower_bound(low, high, old_high);
      before_low = old_low;
      before_high = old_high;
    }
  }
  ladder.depth = depth;
}

std::uint32_t Segment::count(std::uint32_t low, std::uint32_t high, std::uint32_t rank) const {
  if (high - low <= kScanRows || masked_) return next_.count(low, high, rank);
  const std::uint32_t begin = from_.lower_bound(first_[rank], first_[rank + 1], low);
  return from_.lower_bound(begin, first_[rank + 1], high) - begin;
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
  require(position_.size() == n && from_.size() == n && first_.size() == alphabet + 1, "sizes differ");
  require(first_[0] == 0 && first_[alphabet] == n, "buckets do not cover the rows");
  std::vector<bool> seen(n + 1), reached(n);
  for (std::uint32_t row = 0; row < n; ++row) {
    require(position_[row] >= 1 && position_[row] <= n && !seen[position_[row]], "positions are not a permutation");
    seen[position_[row]] = true;
    require(from_[row] < n && !reached[from_[row]], "`from` is not a permutation");
    reached[from_[row]] = true;
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
