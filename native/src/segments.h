// Several segments, oldest first: the history of a problem, or the shared text of a namespace.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "segment.h"

namespace histospec {

// A snapshot: swapped as a whole, never changed.
using Segments = std::vector<std::shared_ptr<const Segment>>;

// Which neighbours are merged: those of which the older has less than `growth` times the tokens of the newer (so each
// token is indexed again O(log n) times), as long as they are at most `largest` tokens together.
struct MergePolicy {
  std::size_t growth = 2;
  std::size_t largest = SIZE_MAX;
};

// `segments` with `fresh` behind them, after the housekeeping that keeps them few: merging, and what is older than the
// newest `epochs` epochs is left out where it can be: a whole segment at once, single responses when they are merged.
// `evicted` grows by the responses left out.
std::shared_ptr<const Segments> with_segment(const Segments& segments, std::shared_ptr<const Segment> fresh, int epochs,
                                             std::size_t& evicted, MergePolicy policy = {});

}  // namespace histospec
