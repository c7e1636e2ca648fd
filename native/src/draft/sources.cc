#include "draft/sources.h"

#include <algorithm>
#include <cstdlib>

namespace histospec {
namespace {

// Only the votes of the nearest rows count as aligned.
constexpr int kAlignedRows = 4;

}  // namespace

void SegmentSource::reset(const Segments& segments, Tokens context) {
  followed_ = 0;  // stays if find() runs out of memory
  segments_ = &segments;
  find(context);
  followed_ = segments.number();
}

void SegmentSource::find(Tokens context) {
  behind_ = 0;
  places_.clear();
  places_.reserve(segments_->size());
  for (const auto& segment : *segments_) places_.push_back(segment->find(context));
}

void SegmentSource::catch_up(Tokens context) {
  if (behind_ > patience_) {
    find(context.last(std::min(context.size(), patience_)));
    return;
  }
  for (Token token : context.last(behind_)) {
    for (std::size_t s = 0; s < places_.size(); ++s) (*segments_)[s]->extend(places_[s], token);
  }
  behind_ = 0;
}

void SegmentSource::mark(Trail& trail, std::size_t drafted) const {
  if (behind_ > 0) return;
  trail.followed_ = followed_;
  trail.places_.insert(trail.places_.end(), places_.begin(), places_.end());
  trail.drafted_.push_back(drafted);
}

void SegmentSource::advance(std::size_t tokens, const Trail& trail, std::size_t accepted) {
  advance(tokens);
  const auto marks = std::ranges::upper_bound(trail.drafted_, accepted) - trail.drafted_.begin();
  if (marks == 0 || trail.followed_ != followed_) return;
  const auto segments = static_cast<std::ptrdiff_t>(places_.size());
  std::copy_n(trail.places_.begin() + (marks - 1) * segments, segments, places_.begin());
  behind_ = tokens - trail.drafted_[marks - 1];
}

void SegmentSource::collect_matches(Source source, std::int64_t offset, Evidence& evidence) const {
  const int aligned_rows = source == kHistory ? kAlignedRows : 0;  // of a side
  const int at = static_cast<int>(std::min<std::int64_t>(offset, UINT16_MAX));
  for (std::size_t s = 0; s < places_.size(); ++s) {
    const Segment& segment = *(*segments_)[s];
    evidence.note_match_length(source, static_cast<std::uint8_t>(places_[s].depth()));
    const auto first = static_cast<std::uint16_t>(s * Rows::kEpochs);
    segment.each_near(
        places_[s], std::min(rows_, Segment::most_near(places_[s])), [&](const Neighbour& row, int nearness) {
          const auto name =
              row.next_rank == Segment::kSeparator ? Evidence::kNoToken : evidence.name(segment.token(row.next_rank));
          const float vote = Evidence::vote(row.match_length, nearness);
          const float aligned = nearness < aligned_rows ? vote * Evidence::alignment(row.offset - at) : 0.0f;
          const Match match(row.match_length, source, static_cast<std::uint16_t>(first + row.epoch));
          evidence.add_match(name, match, vote, aligned);
        });
  }
}

std::optional<WeighedMatch> SegmentSource::weighed_match() const {
  std::size_t longest = 0;
  for (std::size_t s = 1; s < places_.size(); ++s) {
    if (places_[s].depth() >= places_[longest].depth()) longest = s;
  }
  if (places_.empty() || places_[longest].depth() == 0) return {};
  const Segment& segment = *(*segments_)[longest];
  const std::uint32_t row = places_[longest].nearest_row(), next = segment.next_rank(row);
  if (!segment.has_alternatives() || next == Segment::kSeparator) return {};
  return WeighedMatch{segment.token(next), segment.alternatives(row)};
}

std::uint8_t SegmentSource::age(const Match& match, std::int64_t newest) const {
  const std::uint16_t id = match.epoch_id();
  return age(*(*segments_)[id / Rows::kEpochs], static_cast<std::uint8_t>(id % Rows::kEpochs), newest);
}

std::uint8_t SegmentSource::age(const Segment& segment, std::uint8_t epoch_name, std::int64_t newest) {
  const std::int64_t epoch = segment.epoch(epoch_name);
  if (epoch >= newest) return 0;
  return static_cast<std::uint8_t>(
      std::min<std::uint64_t>(static_cast<std::uint64_t>(newest) - static_cast<std::uint64_t>(epoch), kOldest));
}

int SegmentSource::depth() const {
  int depth = 0;
  for (const Place& place : places_) depth = std::max(depth, place.depth());
  return depth;
}

void LiveSource::collect_matches(Tokens context, Evidence& evidence) const {
  std::array<LiveText::Occurrence, LiveText::kCandidates> occurrences;
  const int found = live_.find(own_, context, occurrences);
  for (int i = 0; i < found; ++i) {
    const auto length = static_cast<std::uint8_t>(occurrences[i].match_length);
    const Source source = occurrences[i].own ? kOwn : kSiblings;
    evidence.note_match_length(source, length);
    evidence.add_match(evidence.name(occurrences[i].next), Match(length, source), Evidence::vote(length, i));
  }
}

}  // namespace histospec
