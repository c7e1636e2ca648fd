// A segment: the immutable index of some finished responses of one problem.
//
// What it answers: after this context, what came next, how often, and where?
//
// Layout. The responses are laid one after another, each behind the end of its prompt (its head) and a separator:
//
//     text   0 h h h a b c d e  0 h h h a b x d  0 …          n tokens, as ranks in the segment's own alphabet
//     i      0 1 2 3 4 …
//
// Sort all positions i by what stands BEFORE them, read backwards: text[i-1], text[i-2], … Positions with the same last
// k tokens become neighbours, for every k at once: the contexts of length k + 1 are intervals inside that of length k.
// A sorted array is a suffix tree stored flat: an interval is a node, and here the tree is that of the reversed text,
// so that a longer context is a deeper node and the tokens that followed stand side by side:
//
//     one row a position, r = 0 … n - 1; each number 2 bytes, or 4 beyond 65,535 positions or distinct tokens
//     next[r]       the token at position i: what followed this context
//     position[r]   i itself: which response, and how far into it
//     from[r]       the row of position i - 1, i.e. of the same context without its newest token
//     first[t]      where the rows begin whose newest context token is t; one a distinct token
//     extent_of[b]  the first response that reaches into the positions from 64 b on; one every 64 positions
//
// `next` is the Burrows-Wheeler transform of the reversed text, and `from` is its inverse last-to-first mapping. Inside
// the rows of one token t, `from` ascends: they are the rows that are followed by t, in their own order. So the
// interval of "context + t" is found from the interval [low, high) of "context" by two binary searches for low and high
// among the rows of t (backward search; P. Ferragina, G. Manzini, "Opportunistic data structures with applications",
// FOCS 2000), without touching the text. The text is not stored at all: walking `from` gives it back.
//
// Cost. 6 bytes a token up to 65,535 tokens a segment, 12 beyond, and about 10 bytes a distinct token. Building: ranks
// by hashing, one suffix sort (SA-IS, linear), one pass. Extending a ladder of all orders by one token: two binary
// searches an order, each inside the range that the shorter order found, all in one contiguous piece of `from`.
//
// Threads. Immutable once built: any number of readers, no lock.
#pragma once

#include <array>
#include <memory>
#include <span>
#include <vector>

#include "histospec/types.h"
#include "words.h"

namespace histospec {

// The rows of a segment that share the last k tokens of a context, for k = 1 … depth: [low[k-1], high[k-1]), each
// inside the one before.
struct Ladder {
  int depth = 0;
  std::array<std::uint32_t, kMaxOrder> low;
  std::array<std::uint32_t, kMaxOrder> high;

  std::uint32_t size(int order) const { return order > depth ? 0 : high[order - 1] - low[order - 1]; }
};

class Segment {
 public:
  static constexpr std::uint32_t kSeparator = 0;  // the rank that stands between responses; nothing is drafted from it

  struct Extent {
    std::uint32_t start;  // position of the first token after the head
    std::uint32_t end;    // one past its last token
    std::int64_t epoch;
  };

  // The index of these responses, in this order. Throws std::length_error beyond 2^31 tokens.
  static std::shared_ptr<const Segment> build(std::span<const ResponseView> responses);

  // The responses again, equal to what was indexed.
  std::vector<Response> responses() const;
  std::span<const Extent> extents() const { return extents_; }
  std::size_t tokens() const { return tokens_; }
  // What this object holds, allocations included.
  std::size_t bytes() const;

  // The rank of a token, kSeparator if the segment does not have it; and back.
  std::uint32_t rank(Token token) const;
  Token token(std::uint32_t rank) const { return alphabet_[rank]; }

  // The ladder of `context` (its last kMaxOrder tokens count).
  Ladder find(Tokens context) const;
  // The ladder of the context that `ladder` stands for, followed by `token`.
  void extend(Ladder& ladder, Token token) const;

  // The rank that followed row r's context; kSeparator at the end of a response and where nothing was generated.
  std::uint32_t next(std::uint32_t row) const { return next_[row]; }
  // How many rows in [low, high) were followed by `rank`.
  std::uint32_t count(std::uint32_t low, std::uint32_t high, std::uint32_t rank) const;
  // How many tokens of its response stand before the position of this row; negative inside the head.
  std::int64_t offset(std::uint32_t row) const;

  // Re-derives every invariant above; throws std::logic_error naming the first that fails.
  void check_integrity() const;

 private:
  static constexpr std::uint32_t kBlock = 64;

  Segment() = default;
  std::vector<std::uint32_t> rank_text(std::span<const ResponseView> responses);
  void sort_rows(std::span<const std::uint32_t> text);
  void mask(std::span<const ResponseView> responses);
  void hash_alphabet();
  std::vector<std::uint32_t> text() const;

  std::size_t tokens_ = 0;
  bool masked_ = false;
  std::uint32_t last_row_ = 0;  // of the position after the last token: where walking `from` starts
  std::vector<Extent> extents_;
  Words extent_of_;                   // block of kBlock positions -> the first response that reaches into it
  std::vector<Token> alphabet_;       // rank -> token; [kSeparator] is -1
  std::vector<std::uint32_t> slots_;  // open addressing, token -> rank, 0 is free
  Words first_;                       // rank -> first row; [alphabet] = n
  Words next_;
  Words position_;
  Words from_;
};

}  // namespace histospec
