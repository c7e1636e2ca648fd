// Sources turn an index into evidence. Each source follows one session: it moves along the context token by token and
// collects the matches of the context, each with the token that followed it.
#pragma once

#include <array>
#include <optional>
#include <span>
#include <vector>

#include "draft/evidence.h"
#include "index/segments.h"
#include "live/live_text.h"

namespace histospec {

// The last kMaxOrder tokens of a context, contiguous, newest last.
class ContextTail {
 public:
  void push(Token token) {
    if (end_ == buffer_.size()) {
      std::copy(buffer_.end() - kMaxOrder, buffer_.end(), buffer_.begin());
      end_ = kMaxOrder;
    }
    buffer_[end_++] = token;
  }
  Tokens tokens() const {
    const std::size_t size = end_ < kMaxOrder ? end_ : kMaxOrder;
    return {buffer_.data() + end_ - size, size};
  }

 private:
  std::array<Token, 4 * kMaxOrder> buffer_;
  std::size_t end_ = 0;
};

// The gaps of a source along a draft, so that it need not look up the accepted part again.
class Trail {
 public:
  void clear() {
    gaps_.clear();
    drafted_.clear();
  }

 private:
  friend class SegmentSource;
  std::uint64_t followed_ = 0;        // number of the Segments that the source followed
  std::vector<RowGap> gaps_;          // for each mark, one per segment
  std::vector<std::size_t> drafted_;  // drafted tokens before each mark, ascending
};

// A match, and the policy's own probabilities there.
struct WeighedMatch {
  Match match;
  Token next;           // the token that followed
  Alternatives others;  // none if nothing else had 5 %

  // The probability of the token that followed.
  float probability() const { return others.count() == 0 ? 0.97f : others.sampled_probability(); }
};

// Finished responses of the problem, or of its whole namespace. The caller gives the segments to each call, because the
// engine may evict them while a session is idle. At the start of a step, call follow() before any other method.
class SegmentSource {
 public:
  // If the source is more than `patience` tokens behind, it searches again from the last `patience` tokens. It collects
  // at most `rows` rows on either side of a gap.
  explicit SegmentSource(std::size_t patience = kMaxOrder, int rows = Segment::kNear)
      : patience_(patience), rows_(rows) {}
  // Follows these segments, from the end of this context.
  void reset(const Segments& segments, Tokens context);
  // As reset(), unless the source follows these segments already.
  void follow(const Segments& segments, Tokens context) {
    if (followed_ != segments.number()) reset(segments, context);
  }
  // Notes that the context has grown by `tokens`. Cheap, because catch_up() does the lookups.
  void advance(std::size_t tokens) { behind_ += tokens; }
  // As above, if the first `accepted` tokens had been drafted: continues from the last mark among them.
  void advance(std::size_t tokens, const Trail& trail, std::size_t accepted);
  // Moves to the end of this context. collect_matches() and depth() then describe it.
  void catch_up(const Segments& segments, Tokens context);
  // Marks the gaps after `drafted` tokens of the draft, if the source has caught up.
  void mark(Trail& trail, std::size_t drafted) const;

  // Adds the rows nearest to the context in each segment, as matches of `source`. `offset`: how many tokens the session
  // has generated.
  void collect_matches(const Segments& segments, Source source, std::int64_t offset, Evidence& evidence) const;
  // The longest match if its response came with alternatives; of equally long ones, one in the newest segment.
  std::optional<WeighedMatch> weighed_match(const Segments& segments) const;
  // The age of the response of a match, in epochs behind `newest`, at most kOldest.
  static std::uint8_t age(const Segments& segments, const Match& match, std::int64_t newest);
  // The longest match length in any of the segments.
  int depth() const;

 private:
  void find(const Segments& segments, Tokens context);

  std::size_t patience_;
  int rows_;
  std::uint64_t followed_ = 0;  // number of the segments
  std::vector<RowGap> gaps_;    // one per segment
  std::size_t behind_ = 0;      // tokens of the context that the gaps do not include yet
};

// The session's own text and prompt, and those of its siblings.
class LiveSource {
 public:
  LiveSource(const LiveText& live, LiveText::TextId own) : live_(live), own_(own) {}

  // Adds the newest occurrences of the context.
  void collect_matches(Tokens context, Evidence& evidence) const;

 private:
  const LiveText& live_;
  LiveText::TextId own_;
};

// Everything that a session drafts from, for the time of one step: between steps, eviction may free any of it.
struct DraftSources {
  const Segments& history;     // of the problem
  const Segments& namespace_;  // of all problems
  LiveSource live;
  Tokens twin = {};  // empty: the session has none
};

}  // namespace histospec
