// Several segments, oldest first: the history of a problem, or the shared text of a namespace.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "index/segment.h"

namespace histospec {

// A snapshot, which is replaced as a whole and never changed. Each has a unique number, so that a source can recognise
// it without owning it.
class Segments {
 public:
  using List = std::vector<std::shared_ptr<const Segment>>;

  Segments() = default;
  explicit Segments(List list) : list_(std::move(list)) {}
  Segments(const Segments&) = delete;
  Segments& operator=(const Segments&) = delete;

  const List& list() const { return list_; }
  List::const_iterator begin() const { return list_.begin(); }
  List::const_iterator end() const { return list_.end(); }
  std::size_t size() const { return list_.size(); }
  bool empty() const { return list_.empty(); }
  const Segment& operator[](std::size_t i) const { return *list_[i]; }

  std::uint64_t number() const { return number_; }
  // The tokens of all segments, and the memory of this object and all segments.
  std::size_t tokens() const;
  std::size_t bytes() const;
  // These without the oldest segment; there is one.
  std::shared_ptr<const Segments> without_oldest() const {
    return std::make_shared<const Segments>(List(begin() + 1, end()));
  }

 private:
  static std::uint64_t next_number() {
    static std::atomic<std::uint64_t> last = 0;
    return ++last;
  }

  const List list_;
  const std::uint64_t number_ = next_number();
};

// Which of the newest segments are merged: a run in which each has less than `growth` times the tokens of the largest
// newer one. Two segments are enough for a merge; while all together have at most `small` tokens, it takes `fan_in`.
// Each token is thereby indexed again O(log n) times, and seldom while responses come one by one. A merged segment has
// at most `largest` tokens.
struct MergePolicy {
  std::size_t growth = 2;
  std::size_t largest = SIZE_MAX;
  std::size_t fan_in = 4;
  std::size_t small = 16384;
};

// Which part of a history is kept: the responses of the newest `epochs` epochs, and of these about the newest
// `responses`.
struct Window {
  int epochs;
  std::size_t responses = SIZE_MAX;
};

// How many responses the window left out, by the limit that they exceeded.
struct LeftOut {
  std::size_t epochs = 0;
  std::size_t responses = 0;

  std::size_t all() const { return epochs + responses; }
};

// Returns `segments` with `fresh` at their end, as one segment. Merges it with others by the policy, and leaves out
// what is outside of the window: a segment as a whole, single responses when they are merged. Adds the responses left
// out to `evicted`. Builds one segment, whatever it merges.
std::shared_ptr<const Segments> with_responses(const Segments& segments, std::span<const ResponseView> fresh,
                                               Window window, LeftOut& evicted, MergePolicy policy = {});

// Returns `segments` with `stored`, which is older, before them. Leaves out segments outside of the window. Merges
// nothing; the next with_responses() does.
std::shared_ptr<const Segments> with_stored(const Segments& segments, std::shared_ptr<const Segment> stored,
                                            Window window, LeftOut& evicted);

}  // namespace histospec
