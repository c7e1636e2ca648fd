// Builds a segment: ranks, rows, LCPs of neighbours, and tokens that were not generated.
#include <algorithm>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>

#include "index/segment.h"
#include "index/suffix_array.h"

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
  const std::vector<bool> not_generated = hidden(responses, ranked);
  segment->masked_ = !not_generated.empty();
  std::size_t alternative_bytes = 0;
  for (const ResponseView& r : responses) {
    alternative_bytes += PackedAlternatives(r.alternatives, r.tokens.size()).group_bytes();
  }
  segment->lay_out(ranked, alternative_bytes);
  segment->sort_rows(ranked, not_generated);
  segment->keep_alternatives(responses);
  return segment;
}

Segment::Ranked Segment::rank(std::span<const ResponseView> responses) {
  std::size_t n = 0;
  for (const ResponseView& r : responses) n += 1 + tail(r.head).size() + r.tokens.size();
  if (n >= kMaxText) throw std::length_error("segment: has " + std::to_string(n) + " tokens, must be at most 2^31 - 1");
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

void Segment::lay_out(const Ranked& ranked, std::size_t alternative_bytes) {
  const std::size_t n = ranked.text.size(), alphabet = ranked.alphabet.size(), responses = ranked.extents.size();
  const std::size_t largest = std::max(n, alphabet);
  const auto arrays = [&](Layout layout) {
    extents_ = layout.take_array<Extent>(responses);
    alphabet_ = layout.take_array<Token>(alphabet);
    slots_ = Words(layout, ranked.slots.size(), alphabet);
    first_ = Words(layout, alphabet + 1, largest);
    previous_row_ = Words(layout, n, largest);
    rows_ = Rows(layout, n, largest);
    alternatives_ = AlternativeRows(layout, n, alternative_bytes);
    return layout.size();
  };
  memory_ = Block(arrays(Layout(nullptr)));
  arrays(Layout(memory_.data()));

  std::ranges::copy(ranked.extents, extents_.begin());
  std::ranges::copy(ranked.alphabet, alphabet_.begin());
  for (std::size_t i = 0; i < ranked.slots.size(); ++i) slots_.set(i, ranked.slots[i]);
  for (const Extent& extent : extents_) tokens_ += extent.end - extent.start;
  name_epochs();
}

void Segment::name_epochs() {
  std::int64_t older = INT64_MAX;
  for (epochs_named_ = 0; epochs_named_ < Rows::kEpochs; ++epochs_named_) {
    std::optional<std::int64_t> newest;
    for (const Extent& extent : extents_) {
      if (extent.epoch < older && (!newest || extent.epoch > *newest)) newest = extent.epoch;
    }
    if (!newest) break;
    older = epochs_[epochs_named_] = *newest;
  }
}

// Which positions hold tokens of tool and user turns. These are context and must not be drafted, so their rows get a
// separator as the next token. Empty if all tokens were generated.
std::vector<bool> Segment::hidden(std::span<const ResponseView> responses, const Ranked& ranked) {
  std::vector<bool> hidden;
  for (std::size_t j = 0; j < responses.size(); ++j) {
    const auto& generated = responses[j].generated;
    for (std::size_t i = 0; i < generated.size(); ++i) {
      if (generated[i]) continue;
      hidden.resize(ranked.text.size() + 1);
      hidden[ranked.extents[j].start + i] = true;
    }
  }
  return hidden;
}

// The text is a circle: its first separator also follows its last token. Every position thereby has a context and every
// token has a row, and `previous_row` is a permutation. The suffix sort does not know of the circle. This matters at
// one place: position 1, with nothing before its separator, sorts first, wherever position n (the whole text) sorts.
void Segment::sort_rows(const Ranked& ranked, const std::vector<bool>& hidden) {
  const std::vector<std::uint32_t>& text = ranked.text;
  const auto n = static_cast<std::uint32_t>(text.size());
  const auto alphabet = static_cast<std::uint32_t>(alphabet_.size());
  if (n == 0) return;
  std::vector<std::uint32_t> position(n);  // of each row: 1 … n; position n is the separator at 0 again
  {
    const std::vector<std::uint32_t> reversed(text.rbegin(), text.rend());
    suffix_array(reversed, alphabet, position);
    for (std::uint32_t& p : position) p = n - p;
  }
  std::vector<std::uint32_t> row_of(n + 1), first(alphabet + 1);
  for (std::uint32_t row = 0; row < n; ++row) row_of[position[row]] = row;
  last_row_ = row_of[n];
  for (std::uint32_t c : text) ++first[c + 1];
  std::partial_sum(first.begin(), first.end(), first.begin());
  for (std::uint32_t c = 0; c <= alphabet; ++c) first_.set(c, first[c]);

  // LCPs of neighbours: T. Kasai et al., "Linear-time longest-common-prefix computation in suffix arrays", CPM 2001.
  // For a context without its newest token, the LCP is at most one token less. Matches end at a separator.
  int lcp = 0;
  std::uint32_t next_row = 0;  // position 1 has nothing before its separator, so it sorts first
  auto extent = extents_.rbegin();
  for (std::uint32_t p = n; p > 0; --p) {
    const std::uint32_t row = row_of[p];
    lcp = row == 0 ? 0 : std::max(lcp - 1, 0);
    if (row > 0) {
      const std::uint32_t other = position[row - 1];
      const int most = static_cast<int>(std::min<std::uint32_t>({p, other, kMaxOrder}));
      while (lcp < most && text[p - 1 - lcp] == text[other - 1 - lcp] && text[p - 1 - lcp] != kSeparator) {
        ++lcp;
      }
    }
    while (extent + 1 != extents_.rend() && p <= (extent + 1)->end) ++extent;
    const std::uint32_t offset = p > extent->start ? std::min<std::uint32_t>(p - extent->start, UINT16_MAX) : 0;
    const bool ends = p == n || (masked_ && hidden[p]);
    rows_.set(row, {ends ? kSeparator : text[p], next_row, static_cast<std::uint16_t>(offset),
                    static_cast<std::uint8_t>(lcp), epoch_name(extent->epoch)});
    previous_row_.set(next_row, row);
    next_row = row;
  }
  rows_.seal();
}

template <typename Visit>
void Segment::each_position(std::span<const ResponseView> responses, Visit visit) const {
  std::size_t j = responses.size();
  std::optional<PackedAlternatives> packed;
  each_row([&](std::uint32_t row, std::uint32_t position) {
    while (j > 0 && position < extents_[j - 1].end) {
      // Position p is where text[p] came, so the last position of a response is one before its end.
      if (!packed) packed.emplace(responses[j - 1].alternatives, responses[j - 1].tokens.size());
      if (position >= extents_[j - 1].start) {
        visit(row, packed->previous());
        return;
      }
      packed.reset();
      --j;
    }
  });
}

void Segment::keep_alternatives(std::span<const ResponseView> responses) {
  if (alternatives_.empty()) return;
  each_position(responses,
                [this](std::uint32_t row, Alternatives here) { alternatives_.set_count(row, here.count()); });
  alternatives_.seal();
  each_position(responses, [this](std::uint32_t row, Alternatives here) {
    if (here.count() > 0) alternatives_.set_group(row, here);
  });
}

}  // namespace histospec
