#include "sources.h"

#include <cstdlib>

namespace histospec {
namespace {

// Rows looked at for candidates, a context length; evenly spaced where there are more.
constexpr std::uint32_t kProposingRows = 6;
constexpr int kProposingOrders = 3;
// "The aligned position": rows of a context of kAlignedOrder tokens at most kAlignedWindow tokens from the same offset.
constexpr int kAlignedOrder = 3;
constexpr std::int64_t kAlignedWindow = 12;
constexpr std::uint32_t kAlignedRows = 16;

// One vote of an order-k context: longer contexts know better.
float weight(int order) { return static_cast<float>(order); }

using Ranks = std::array<std::uint32_t, kMaxCandidates>;

Ranks ranks_of(const Segment& segment, const Candidates& candidates) {
  Ranks ranks{};
  for (int c = 0; c < candidates.size(); ++c) ranks[c] = segment.rank(candidates[c]);
  return ranks;
}

}  // namespace

void HistorySource::reset(const std::shared_ptr<const Segments>& segments, Tokens context) {
  followed_ = segments;
  segments_ = segments.get();
  find(context);
}

void HistorySource::find(Tokens context) {
  behind_ = 0;
  ladders_.clear();
  ladders_.reserve(segments_->size());
  for (const auto& segment : *segments_) ladders_.push_back(segment->find(context));
}

void HistorySource::follow(const std::shared_ptr<const Segments>& segments, Tokens context) {
  if (followed_.lock() != segments) reset(segments, context);
}

void HistorySource::catch_up(Tokens context) {
  if (behind_ >= context.size()) {
    find(context);
    return;
  }
  for (Token token : context.last(behind_)) {
    for (std::size_t s = 0; s < ladders_.size(); ++s) (*segments_)[s]->extend(ladders_[s], token);
  }
  behind_ = 0;
}

void HistorySource::propose(Candidates& candidates) const {
  for (std::size_t s = 0; s < ladders_.size(); ++s) {
    const Segment& segment = *(*segments_)[s];
    const Ladder& ladder = ladders_[s];
    std::uint32_t deeper = 0;
    int shown = 0;
    for (int a = kOrderCount; a-- > 0 && shown < kProposingOrders;) {
      const std::uint32_t size = ladder.size(kOrders[a]);
      if (size == deeper) continue;  // nothing that the deeper order did not show
      deeper = size;
      ++shown;
      const std::uint32_t low = ladder.low[kOrders[a] - 1];
      const std::uint32_t rows = std::min(size, kProposingRows);
      const float votes = weight(kOrders[a]) / static_cast<float>(rows);
      for (std::uint32_t j = 0; j < rows; ++j) {
        const auto row = low + static_cast<std::uint32_t>(static_cast<std::uint64_t>(size) * j / rows);
        const std::uint32_t next = segment.next(row);
        if (next != Segment::kSeparator) candidates.vote(segment.token(next), votes);
      }
    }
  }
}

void HistorySource::count(const Candidates& candidates, Counts& counts) const {
  for (std::size_t s = 0; s < ladders_.size(); ++s) {
    const Segment& segment = *(*segments_)[s];
    const Ladder& ladder = ladders_[s];
    if (ladder.depth == 0) continue;
    const Ranks ranks = ranks_of(segment, candidates);
    // From the deepest order outwards: only the rows that an order adds to the next deeper one are counted, and of
    // those only the nearest, whose contexts are the most alike.
    std::array<std::uint32_t, kMaxCandidates> sum{};
    std::uint32_t low = 0, high = 0;
    for (int a = kOrderCount; a-- > 0;) {
      if (kOrders[a] > ladder.depth) continue;
      const std::uint32_t wider_low = ladder.low[kOrders[a] - 1], wider_high = ladder.high[kOrders[a] - 1];
      if (low == high) low = high = wider_low + (wider_high - wider_low) / 2;
      const std::uint32_t next_low = low - std::min(low - wider_low, kNearRows);
      const std::uint32_t next_high = high + std::min(wider_high - high, kNearRows);
      for (int c = 0; c < candidates.size(); ++c) {
        if (ranks[c] == Segment::kSeparator) continue;
        sum[c] += segment.count(next_low, low, ranks[c]) + segment.count(high, next_high, ranks[c]);
        counts.of[a][c] += sum[c];
      }
      low = next_low;
      high = next_high;
      counts.total[a] += high - low;
    }
  }
}

void HistorySource::count_aligned(std::int64_t offset, Evidence& evidence) const {
  for (std::size_t s = 0; s < ladders_.size(); ++s) {
    const Segment& segment = *(*segments_)[s];
    const std::uint32_t size = ladders_[s].size(kAlignedOrder);
    if (size == 0) continue;
    const Ranks ranks = ranks_of(segment, evidence.candidates);
    const std::uint32_t low = ladders_[s].low[kAlignedOrder - 1];
    for (std::uint32_t row = low; row < low + std::min(size, kAlignedRows); ++row) {
      const std::uint32_t next = segment.next(row);
      if (next == Segment::kSeparator || std::abs(segment.offset(row) - offset) > kAlignedWindow) continue;
      ++evidence.aligned_total;
      for (int c = 0; c < evidence.candidates.size(); ++c) evidence.aligned[c] += next == ranks[c];
    }
  }
}

int HistorySource::depth() const {
  int depth = 0;
  for (const Ladder& ladder : ladders_) depth = std::max(depth, ladder.depth);
  return depth;
}

void LiveSource::propose(Candidates& candidates) const {
  for (int i = 0; i < found_; ++i) {
    candidates.vote(matches_[i].next, weight(matches_[i].length) / static_cast<float>(1 + i));
  }
}

void LiveSource::count(Evidence& evidence) const {
  for (int i = 0; i < found_; ++i) {
    const LiveText::Match& match = matches_[i];
    Counts& counts = evidence.counts[match.own ? kOwn : kSiblings];
    int candidate = 0;
    while (candidate < evidence.candidates.size() && evidence.candidates[candidate] != match.next) ++candidate;
    for (int a = 0; a < kOrderCount && kOrders[a] <= match.length; ++a) {
      ++counts.total[a];
      if (candidate < evidence.candidates.size()) ++counts.of[a][candidate];
    }
  }
}

}  // namespace histospec
