// Sources turn an index into evidence. Each follows one session: it moves along the context token by token, and
// collects the matches of the context, with the token that followed each.
#pragma once

#include <array>
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

// Where a source was along a draft, so that it need not follow the accepted part again.
class Trail {
 public:
  void clear() {
    places_.clear();
    drafted_.clear();
  }

 private:
  friend class SegmentSource;
  std::uint64_t followed_ = 0;        // the number of the segments that the source followed
  std::vector<Place> places_;         // one a segment, mark by mark
  std::vector<std::size_t> drafted_;  // tokens before each mark, ascending
};

// Finished responses of the problem, or of its whole namespace. The source does not own the segments that it follows:
// the engine may evict them while a session is idle. After that, call follow() before anything else.
class SegmentSource {
 public:
  // If the source is more than `patience` tokens behind, it searches again from the last `patience` tokens. It collects
  // at most `rows` rows on either side of a place.
  explicit SegmentSource(std::size_t patience = kMaxOrder, int rows = Segment::kNear)
      : patience_(patience), rows_(rows) {}
  // Follows these segments from now on, from the end of this context.
  void reset(const Segments& segments, Tokens context);
  // The same, unless it follows these segments already.
  void follow(const Segments& segments, Tokens context) {
    if (followed_ != segments.number()) reset(segments, context);
  }
  // The context has grown by so many tokens. Cheap: catch_up() does the lookups.
  void advance(std::size_t tokens) { behind_ += tokens; }
  // The same, where the first `accepted` tokens had been drafted: continues from the last mark among them.
  void advance(std::size_t tokens, const Trail& trail, std::size_t accepted);
  // Moves to the end of this context, which collect_matches() and depth() then describe.
  void catch_up(Tokens context);
  // Marks its place after so many drafted tokens, if it has caught up.
  void mark(Trail& trail, std::size_t drafted) const;

  // Adds the rows nearest to the context in each segment, as matches of `source`. `offset`: how many tokens the
  // session has generated.
  void collect_matches(Source source, std::int64_t offset, Evidence& evidence) const;
  // How many epochs older than `newest` the response of a match of this source is, at most kOldest.
  std::uint8_t age(const Match& match, std::int64_t newest) const;
  // The longest match length in any of the segments.
  int depth() const;

 private:
  void find(Tokens context);

  std::size_t patience_;
  int rows_;
  std::uint64_t followed_ = 0;  // the number of segments_
  const Segments* segments_ = nullptr;
  std::vector<Place> places_;  // one a segment
  std::size_t behind_ = 0;     // tokens of the context that the places do not include yet
};

// The session's own text and prompt, and its siblings'.
class LiveSource {
 public:
  LiveSource(const LiveText& live, LiveText::TextId own) : live_(live), own_(own) {}

  // Adds the newest occurrences of the context.
  void collect_matches(Tokens context, Evidence& evidence) const;

 private:
  const LiveText& live_;
  LiveText::TextId own_;
};

}  // namespace histospec
