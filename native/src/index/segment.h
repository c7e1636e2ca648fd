// A segment: the immutable index of some finished responses of one problem.
//
// It answers: which tokens followed a context, how often, and where?
//
// Layout. The responses lie one after another. Each follows a separator and the end of its prompt (its head):
//
//     text   0 h h h a b c d e  0 h h h a b x d  0 …          n tokens, as ranks in the segment's own alphabet
//     i      0 1 2 3 4 …
//
// Sort all positions i by the text BEFORE them, read backwards: text[i-1], text[i-2], … Positions with the same last k
// tokens become neighbours, for every k at once: the contexts of length k + 1 are intervals inside that of length k. A
// sorted array is a suffix tree stored flat, and an interval is a node. Here it is the tree of the reversed text, so a
// longer context is a deeper node and the tokens that followed stand side by side:
//
//     one row per position, r = 0 … n - 1; each number 2 bytes, or 4 beyond 65,535 positions or distinct tokens
//     next_rank[r]     the token at position i: the token that followed this context
//     next_row[r]      the row of position i + 1, i.e. of this context and the token that followed it
//     offset[r]        the offset of position i in its response; always 2 bytes
//     lcp[r]           the match length of the contexts of rows r - 1 and r, up to kMaxOrder; 6 bits
//     epoch[r]         the epoch of its response, among the newest of the segment; 2 bits
//     previous_row[r]  the row of position i - 1, i.e. of this context without its newest token
//     first[t]         the first row whose newest context token is t; one per distinct token
//     alternatives[r]  what else the policy found probable at position i (alternatives.h); at few rows, if any
//
// `next_rank` is the Burrows-Wheeler transform of the reversed text, `next_row` its last-to-first mapping (LF-mapping),
// and `previous_row` the inverse of that. `lcp` is the array of longest common prefixes, here of texts read backwards.
// Inside the rows of one token t, `previous_row` ascends: it lists the rows that are followed by t, in their own order.
// A context has a gap among the rows, where it would be sorted in. The gap of "context + t" is where the gap of
// "context" falls among the rows of t. It takes one binary search (backward search; P. Ferragina, G.
// Manzini, "Opportunistic data structures with applications", FOCS 2000), without touching the text. The rows on either
// side of the gap have the longest match with the context, and `lcp` gives its length. Going outwards from the gap,
// match lengths never grow, so a lookup need not know where the intervals of shorter contexts end. Neither the text nor
// the positions are stored: walking `previous_row` restores them.
//
// Cost. 9 bytes per token up to 65,535 tokens in a segment, 15 beyond, and about 10 bytes per distinct token. Building:
// ranks by hashing, one suffix sort (SA-IS, linear), two passes. Moving a gap by one token (extend() lists the cases)
// mostly reads two rows, each in one cache line (rows.h), or a few neighbours. Otherwise it takes one binary search in
// one contiguous piece of `previous_row`.
//
// Threads. A segment is immutable once built: any number of readers, no lock.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "hash/keyed.h"
#include "histospec/types.h"
#include "index/alternatives.h"
#include "index/block.h"
#include "index/rows.h"

namespace histospec {

// The gap between two rows of a segment, row - 1 and row, where a context would be sorted in. `above` is its match
// length with row - 1, `below` its match length with row.
struct RowGap {
  std::uint32_t row = 0;
  std::uint8_t above = 0;
  std::uint8_t below = 0;

  int depth() const { return std::max(above, below); }
  // The row that matches the context longest. There is one if depth() is not 0.
  std::uint32_t nearest_row() const { return above >= below ? row - 1 : row; }
};

// A row near a gap.
struct Neighbour {
  std::uint32_t next_rank;    // the rank that followed; kSeparator where a response ended or nothing was generated
  std::uint16_t offset;       // tokens of its response before it; 0 inside the head, 65,535 means as many or more
  std::uint8_t match_length;  // how many tokens of the context stand before it
  std::uint8_t epoch;         // of its response: an argument for Segment::epoch()
};

class Segment {
 public:
  static constexpr std::uint32_t kSeparator = 0;  // the rank between responses; never drafted

  struct Extent {
    std::uint32_t start;  // position of the first token after the head
    std::uint32_t end;    // one past its last token
    std::int64_t epoch;
  };

  // The index of these responses, in this order. Throws std::length_error beyond 2^31 tokens.
  static std::shared_ptr<const Segment> build(std::span<const ResponseView> responses);

  // The indexed responses, restored.
  std::vector<Response> responses() const;
  std::span<const Extent> extents() const { return extents_; }
  std::size_t tokens() const { return tokens_; }
  // The epoch that a Neighbour::epoch stands for. The last one also stands for all older epochs.
  std::int64_t epoch(std::uint8_t name) const { return epochs_[name]; }
  // The memory of this object, allocations included.
  std::size_t bytes() const;

  // The rank of a token, or kSeparator if the segment does not have it; and the token of a rank.
  std::uint32_t rank(Token token) const;
  Token token(std::uint32_t rank) const { return alphabet_[rank]; }

  // The gap of `context` (its last kMaxOrder tokens count).
  RowGap find(Tokens context) const;
  // Moves to the gap of the context followed by `token`.
  void extend(RowGap& gap, Token token) const;

  std::uint32_t rows() const { return static_cast<std::uint32_t>(rows_.size()); }
  // How many rows on either side of a gap are worth reading. With a long match, fewer rows are enough.
  static constexpr int kNear = 6;
  static int most_near(const RowGap& gap) {
    constexpr int kMuch = 11, kFew = 4;
    return gap.depth() < kMuch ? kNear : kFew;
  }
  // Calls visit(neighbour, nearness) for the rows near a gap that match its context: at most `most` above it, nearest
  // first, then at most `most` below. The nearest has nearness 0.
  template <typename Visit>
  void each_near(const RowGap& gap, int most, Visit visit) const {
    if (gap.above > 0) rows_.prefetch(rows_[gap.row - 1].next_row);
    if (gap.below > 0) rows_.prefetch(rows_[gap.row].next_row);
    rows_.read([&](auto rows) {
      std::uint8_t match_length = gap.above;
      std::uint32_t r = gap.row;
      for (int i = 0; i < most && match_length > 0; ++i) {
        const Row row = rows[--r];
        visit(Neighbour{row.next_rank, row.offset, match_length, row.epoch}, i);
        match_length = std::min(match_length, row.lcp);
      }
      match_length = gap.below;
      r = gap.row;
      for (int i = 0; i < most && match_length > 0; ++i) {
        const Row row = rows[r];
        visit(Neighbour{row.next_rank, row.offset, match_length, row.epoch}, i);
        match_length = std::min(match_length, rows[++r].lcp);
      }
    });
  }

  Row row(std::uint32_t row) const { return rows_[row]; }
  // Whether any of its responses came with alternatives.
  bool has_alternatives() const { return !alternatives_.empty(); }
  // What else the policy found probable at the position of this row.
  Alternatives alternatives(std::uint32_t row) const { return alternatives_[row]; }

  // Re-derives every invariant above; throws std::logic_error naming the first that fails.
  void check_integrity() const;

 private:
  struct Ranked;  // the text while a segment is built

  // Open addressing: the first slot for the token where fits(slot) is true.
  template <typename Fits>
  static std::size_t find_slot(Token token, std::size_t slots, Fits fits) {
    const std::uint64_t hash = hash_key.of(static_cast<std::uint32_t>(token)) >> 32;
    std::size_t slot = (hash * slots) >> 32;
    while (!fits(slot)) slot = slot + 1 == slots ? 0 : slot + 1;
    return slot;
  }

  Segment() = default;
  static Ranked rank(std::span<const ResponseView> responses);
  void lay_out(const Ranked& ranked, std::size_t alternative_bytes);
  static std::vector<bool> hidden(std::span<const ResponseView> responses, const Ranked& ranked);
  void sort_rows(const Ranked& ranked, const std::vector<bool>& hidden);
  void keep_alternatives(std::span<const ResponseView> responses);
  // Calls visit(row, alternatives) for every row of a generated position.
  template <typename Visit>
  void each_position(std::span<const ResponseView> responses, Visit visit) const;
  // Calls visit(row, position) for every position, from n down to 1.
  template <typename Visit>
  void each_row(Visit visit) const {
    for (std::uint32_t row = last_row_, position = rows(); position > 0; row = previous_row_[row])
      visit(row, position--);
  }
  void name_epochs();
  std::uint8_t epoch_name(std::int64_t epoch) const;
  // The text as ranks, in the order of the responses.
  std::vector<std::uint32_t> text() const;
  // The row below the new gap, if the token followed one of the nearest rows.
  std::optional<std::uint32_t> continued_nearby(const RowGap& gap, std::uint32_t rank) const;
  RowGap nowhere() const { return {rows() / 2, 0, 0}; }

  std::size_t tokens_ = 0;
  bool masked_ = false;
  std::array<std::int64_t, Rows::kEpochs> epochs_{};  // the newest, newest first; fewer are followed by zeros
  int epochs_named_ = 0;
  std::uint32_t last_row_ = 0;  // of the position after the last token: where a walk along `previous_row` starts
  Block memory_;                // of all arrays below
  std::span<Extent> extents_;
  std::span<Token> alphabet_;  // rank -> token; [kSeparator] is -1
  Words slots_;                // open addressing, token -> rank, 0 is free
  Words first_;                // rank -> first row; [alphabet] = n
  Words previous_row_;
  Rows rows_;
  AlternativeRows alternatives_;
};

}  // namespace histospec
