#include "sources.h"

#include <algorithm>
#include <cstdlib>

namespace histospec {
namespace {

// Where witnesses stand in their responses is asked of the nearest ones only.
constexpr std::size_t kAlignedRows = 4;

std::uint8_t age(std::int64_t newest, std::int64_t epoch) {
  if (epoch >= newest) return 0;
  return static_cast<std::uint8_t>(
      std::min<std::uint64_t>(static_cast<std::uint64_t>(newest) - static_cast<std::uint64_t>(epoch), kOldest));
}

}  // namespace

void HistorySource::reset(const Segments& segments, Tokens context) {
  followed_ = 0;  // until the places are found, for which there must be memory
  segments_ = &segments;
  find(context);
  followed_ = segments.number();
}

void HistorySource::find(Tokens context) {
  behind_ = 0;
  places_.clear();
  places_.reserve(segments_->size());
  for (const auto& segment : *segments_) places_.push_back(segment->find(context));
}

void HistorySource::catch_up(Tokens context) {
  if (behind_ > patience_) {
    find(context.last(std::min(context.size(), patience_)));
    return;
  }
  for (Token token : context.last(behind_)) {
    for (std::size_t s = 0; s < places_.size(); ++s) (*segments_)[s]->extend(places_[s], token);
  }
  behind_ = 0;
}

void HistorySource::mark(Trail& trail, std::size_t drafted) const {
  if (behind_ > 0) return;
  trail.followed_ = followed_;
  trail.places_.insert(trail.places_.end(), places_.begin(), places_.end());
  trail.drafted_.push_back(drafted);
}

void HistorySource::advance(std::size_t tokens, const Trail& trail, std::size_t accepted) {
  advance(tokens);
  const auto marks = std::ranges::upper_bound(trail.drafted_, accepted) - trail.drafted_.begin();
  if (marks == 0 || trail.followed_ != followed_) return;
  const auto segments = static_cast<std::ptrdiff_t>(places_.size());
  std::copy_n(trail.places_.begin() + (marks - 1) * segments, segments, places_.begin());
  behind_ = tokens - trail.drafted_[marks - 1];
}

void HistorySource::testify(Source source, std::int64_t offset, std::int64_t newest, Evidence& evidence) const {
  std::array<Neighbour, 2 * Segment::kNear> found;
  for (std::size_t s = 0; s < places_.size(); ++s) {
    const Segment& segment = *(*segments_)[s];
    const int most = std::min(rows_, Segment::most_near(places_[s]));
    const Segment::Near near = segment.neighbours(places_[s], most, found);
    const std::span<const Neighbour> all(found);
    testify_side(segment, all.first(near.above), source, offset, newest, evidence);
    testify_side(segment, all.subspan(near.above, near.below), source, offset, newest, evidence);
  }
}

// One side, nearest first.
void HistorySource::testify_side(const Segment& segment, std::span<const Neighbour> side, Source source,
                                 std::int64_t offset, std::int64_t newest, Evidence& evidence) {
  for (std::size_t i = 0; i < side.size();) {
    const std::uint32_t next = side[i].next;
    const std::uint8_t level = kLevelOf[side[i].shared];
    Evidence::Voices voices{next == Segment::kSeparator ? Evidence::kNoToken : evidence.name(segment.token(next)),
                            source,
                            side[i].shared,
                            0,
                            0,
                            0,
                            0,
                            age(newest, segment.epoch(side[i].epoch))};
    for (; i < side.size() && side[i].next == next; ++i) {
      const float vote = Evidence::vote(side[i].shared, static_cast<int>(i));
      voices.votes += vote;
      ++voices.count;
      voices.at_level += kLevelOf[side[i].shared] == level;
      if (source == kHistory && i < kAlignedRows) {
        voices.aligned += vote * Evidence::alignment(side[i].offset - offset);
      }
    }
    evidence.add(voices);
  }
}

int HistorySource::depth() const {
  int depth = 0;
  for (const Place& place : places_) depth = std::max(depth, place.depth());
  return depth;
}

void LiveSource::testify(Tokens context, Evidence& evidence) const {
  std::array<LiveText::Match, LiveText::kCandidates> matches;
  const int found = live_.find(own_, context, matches);
  for (int i = 0; i < found; ++i) {
    const auto length = static_cast<std::uint8_t>(matches[i].length);
    evidence.add({evidence.name(matches[i].next), matches[i].own ? kOwn : kSiblings, length, 1, 1,
                  Evidence::vote(length, i), 0});
  }
}

}  // namespace histospec
