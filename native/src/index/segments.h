// Several segments, oldest first: the history of a problem, or the common text of a namespace.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "index/segment.h"

namespace histospec {

// A snapshot: swapped as a whole, never changed. Each has a number that none had before, by which it is known again
// without being kept.
class Segments : public std::vector<std::shared_ptr<const Segment>> {
 public:
  using vector::vector;
  Segments(const Segments& other) : vector(other) {}

  std::uint64_t number() const { return number_; }

 private:
  static std::uint64_t next_number() {
    static std::atomic<std::uint64_t> last = 0;
    return ++last;
  }

  const std::uint64_t number_ = next_number();
};

// Which of the newest segments are merged: a run of similar ones, each less than `growth` times the largest of those
// newer than itself, as soon as there are two of them; as long as all together are small, at `fan_in`. So each token is
// indexed again O(log n) times, and seldom while responses come one by one. At most `largest` tokens are merged.
struct MergePolicy {
  std::size_t growth = 2;
  std::size_t largest = SIZE_MAX;
  std::size_t fan_in = 4;
  std::size_t small = 16384;
};

// What is kept of a history: the responses of so many of the newest epochs, and of these about the newest so many.
struct Window {
  int epochs;
  std::size_t responses = SIZE_MAX;
};

// Responses that the window left out, by the limit that they were over.
struct LeftOut {
  std::size_t epochs = 0;
  std::size_t responses = 0;

  std::size_t all() const { return epochs + responses; }
};

// `segments` with `fresh` behind them, after the housekeeping that keeps them few: merging, and what is outside of the
// window is left out where it can be: a whole segment at once, single responses when they are merged. `evicted` grows
// by the responses left out.
std::shared_ptr<const Segments> with_segment(const Segments& segments, std::shared_ptr<const Segment> fresh,
                                             Window window, LeftOut& evicted, MergePolicy policy = {});

// `segments` with `stored` before them, which is older: what is outside of the window is left out where it can be.
// Nothing is merged: that comes when newer responses do.
std::shared_ptr<const Segments> with_stored(const Segments& segments, std::shared_ptr<const Segment> stored,
                                            Window window, LeftOut& evicted);

}  // namespace histospec
