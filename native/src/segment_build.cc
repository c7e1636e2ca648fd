// How a segment is built: ranks, rows, what neighbours share, what nobody generated.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "segment.h"
#include "suffix_array.h"

namespace histospec {
namespace {

constexpr std::size_t kMaxText = std::size_t{1} << 31;

}  // namespace

struct Segment::Ranked {
  std::vector<std::uint32_t> text;
  std::vector<Token> alphabet = {-1};
  std::vector<std::uint32_t> slots = std::vector<std::uint32_t>(64);
  std::vector<Extent> extents;

  void append(Token token) {
    std::uint32_t& slot = slots[slot_of(token)];
    if (slot != 0) {
      text.push_back(slot);
      return;
    }
    slot = static_cast<std::uint32_t>(alphabet.size());
    text.push_back(slot);
    alphabet.push_back(token);
    if (2 * alphabet.size() > slots.size()) grow();
  }

 private:
  std::size_t slot_of(Token token) const {
    return find_slot(token, slots.size(),
                     [this, token](std::size_t i) { return slots[i] == 0 || alphabet[slots[i]] == token; });
  }
  void grow() {
    slots.assign(2 * slots.size(), 0);
    for (std::uint32_t rank = 1; rank < alphabet.size(); ++rank) slots[slot_of(alphabet[rank])] = rank;
  }
};

std::shared_ptr<const Segment> Segment::build(std::span<const ResponseView> responses) {
  std::shared_ptr<Segment> segment(new Segment);
  const Ranked ranked = rank(responses);
  segment->lay_out(ranked);
  segment->sort_rows(ranked.text);
  segment->share(ranked.text);
  segment->mask(responses);
  return segment;
}

Segment::Ranked Segment::rank(std::span<const ResponseView> responses) {
  std::size_t n = 0;
  for (const ResponseView& r : responses) n += 1 + tail(r.head).size() + r.tokens.size();
  if (n >= kMaxText) throw std::length_error("segment: " + std::to_string(n) + " tokens are more than 2^31 - 1");
  Ranked ranked;
  ranked.text.reserve(n);
  ranked.extents.reserve(responses.size());
  for (const ResponseView& r : responses) {
    ranked.text.push_back(kSeparator);
    for (Token token : tail(r.head)) ranked.append(token);
    const auto start = static_cast<std::uint32_t>(ranked.text.size());
    for (Token token : r.tokens) ranked.append(token);
    ranked.extents.push_back({start, static_cast<std::uint32_t>(ranked.text.size()), r.epoch});
  }
  return ranked;
}

void Segment::lay_out(const Ranked& ranked) {
  const std::size_t n = ranked.text.size(), alphabet = ranked.alphabet.size(), responses = ranked.extents.size();
  const std::size_t largest = std::max(n, alphabet);
  const auto place = [&](Layout layout) {
    extents_ = layout.take_array<Extent>(responses);
    extent_of_ = Words(layout, n / kBlock + 1, responses);
    alphabet_ = layout.take_array<Token>(alphabet);
    slots_ = Words(layout, ranked.slots.size(), alphabet);
    first_ = Words(layout, alphabet + 1, largest);
    next_ = Words(layout, n, largest);
    position_ = Words(layout, n, largest);
    from_ = Words(layout, n, largest);
    to_ = Words(layout, n, largest);
    shared_ = SharedLengths(layout, n);
    return layout.size();
  };
  memory_ = Block(place(Layout(nullptr)));
  place(Layout(memory_.data()));

  std::ranges::copy(ranked.extents, extents_.begin());
  std::ranges::copy(ranked.alphabet, alphabet_.begin());
  for (std::size_t i = 0; i < ranked.slots.size(); ++i) slots_.set(i, ranked.slots[i]);
  for (const Extent& extent : extents_) tokens_ += extent.end - extent.start;
  for (std::uint32_t block = 0, j = 0; block < extent_of_.size(); ++block) {
    while (j + 1 < extents_.size() && extents_[j].end < block * kBlock) ++j;
    extent_of_.set(block, j);
  }
}

// The text is a circle: its first separator also follows its last token. Then every position has a context and every
// token has a row, and `from` is a permutation. The sort knows no circle, which shows in one place: position 1, with
// nothing before its separator, sorts first, wherever the whole text (position n, from which it comes) sorts.
void Segment::sort_rows(std::span<const std::uint32_t> text) {
  const auto n = static_cast<std::uint32_t>(text.size());
  const auto alphabet = static_cast<std::uint32_t>(alphabet_.size());
  if (n == 0) return;
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
  for (std::uint32_t row = 0; row < n; ++row) to_.set(from_[row], row);
}

// T. Kasai et al., "Linear-time longest-common-prefix computation in suffix arrays", CPM 2001: a context without its
// newest token shares at most one token less with its neighbour. A separator is not shared: nothing matches across it.
void Segment::share(std::span<const std::uint32_t> text) {
  const auto n = static_cast<std::uint32_t>(text.size());
  int length = 0;
  for (std::uint32_t position = n, row = last_row_; position > 0; --position, row = from_[row]) {
    length = std::max(length - 1, 0);
    if (row == 0) {
      length = 0;
      continue;
    }
    const std::uint32_t other = position_[row - 1];
    const auto limit = std::min({static_cast<int>(std::min(position, other)), kMaxOrder});
    while (length < limit && text[position - 1 - length] == text[other - 1 - length] &&
           text[position - 1 - length] != kSeparator) {
      ++length;
    }
    shared_.set(row, length);
  }
  shared_.seal();
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

}  // namespace histospec
