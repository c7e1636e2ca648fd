// Sources turn an index into evidence. Each follows one session: it is moved along the context token by token, and
// names witnesses of what may come next.
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

// Where a source was along a draft: what is accepted of it need not be followed again.
class Trail {
 public:
  void clear() {
    places_.clear();
    drafted_.clear();
  }

 private:
  friend class HistorySource;
  std::uint64_t followed_ = 0;        // what the source looked at
  std::vector<Place> places_;         // one a segment, mark by mark
  std::vector<std::size_t> drafted_;  // tokens before each mark, ascending
};

// Finished responses: of the problem, or of its whole namespace. It does not keep the segments that it looks at: they
// are the engine's, which may evict them while a session is idle. After that, follow() has to come before anything
// else.
class HistorySource {
 public:
  // Who is further behind than `patience` tokens starts anew, with a context of that many. At most so many rows are
  // asked on either side of a place.
  explicit HistorySource(std::size_t patience = kMaxOrder, int rows = Segment::kNear)
      : patience_(patience), rows_(rows) {}
  // Looks at these segments from now on, at the end of this context.
  void reset(const Segments& segments, Tokens context);
  // Looks at these segments from now on, where they are others than so far.
  void follow(const Segments& segments, Tokens context) {
    if (followed_ != segments.number()) reset(segments, context);
  }
  // The context has grown by so many tokens. Cheap: nothing is looked up before it is asked for, by catch_up().
  void advance(std::size_t tokens) { behind_ += tokens; }
  // The same, where the first `accepted` of them had been drafted: goes on at the last mark among those.
  void advance(std::size_t tokens, const Trail& trail, std::size_t accepted);
  // Moves to the end of this context; testify() and depth() speak of where it last was.
  void catch_up(Tokens context);
  // Leaves a mark behind so many drafted tokens, if this is where it is.
  void mark(Trail& trail, std::size_t drafted) const;

  // Adds the rows nearest to the context in each segment, as witnesses of `source`. `offset`: how many tokens the
  // session has generated.
  void testify(Source source, std::int64_t offset, Evidence& evidence) const;
  // How many epochs older than `newest` the response is that a witness of this source is of, at most kOldest.
  std::uint8_t age(std::uint16_t where, std::int64_t newest) const;
  // The longest context known to any of the segments.
  int depth() const;

 private:
  void find(Tokens context);

  std::size_t patience_;
  int rows_;
  std::uint64_t followed_ = 0;  // the number of these
  const Segments* segments_ = nullptr;
  std::vector<Place> places_;  // one a segment
  std::size_t behind_ = 0;     // tokens that the places have not seen
};

// The session's own text and prompt, and its siblings'.
class LiveSource {
 public:
  LiveSource(const LiveText& live, LiveText::TextId own) : live_(live), own_(own) {}

  // Adds the newest places where the context ends.
  void testify(Tokens context, Evidence& evidence) const;

 private:
  const LiveText& live_;
  LiveText::TextId own_;
};

}  // namespace histospec
