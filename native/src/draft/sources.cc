#include "draft/sources.h"

#include <algorithm>
#include <cstdlib>

namespace histospec {
namespace {

// Only the votes of the nearest rows count as aligned.
constexpr int kAlignedRows = 4;

// Stands for an epoch of a segment; SegmentSource::age() reads it.
std::uint16_t epoch_id(std::size_t segment, std::uint8_t epoch) {
  return static_cast<std::uint16_t>(segment * Rows::kEpochs + epoch);
}

}  // namespace

void SegmentSource::reset(const Segments& segments, Tokens context) {
  followed_ = 0;  // stays if find() runs out of memory
  find(segments, context);
  followed_ = segments.number();
}

void SegmentSource::find(const Segments& segments, Tokens context) {
  behind_ = 0;
  gaps_.clear();
  gaps_.reserve(segments.size());
  for (const auto& segment : segments) gaps_.push_back(segment->find(context));
}

void SegmentSource::catch_up(const Segments& segments, Tokens context) {
  if (behind_ > patience_) {
    find(segments, context.last(std::min(context.size(), patience_)));
    return;
  }
  for (Token token : context.last(behind_)) {
    for (std::size_t s = 0; s < gaps_.size(); ++s) segments[s].extend(gaps_[s], token);
  }
  behind_ = 0;
}

void SegmentSource::mark(Trail& trail, std::size_t drafted) const {
  if (behind_ > 0) return;
  trail.followed_ = followed_;
  trail.gaps_.insert(trail.gaps_.end(), gaps_.begin(), gaps_.end());
  trail.drafted_.push_back(drafted);
}

void SegmentSource::advance(std::size_t tokens, const Trail& trail, std::size_t accepted) {
  advance(tokens);
  const auto marks = std::ranges::upper_bound(trail.drafted_, accepted) - trail.drafted_.begin();
  if (marks == 0 || trail.followed_ != followed_) return;
  const auto segments = static_cast<std::ptrdiff_t>(gaps_.size());
  std::copy_n(trail.gaps_.begin() + (marks - 1) * segments, segments, gaps_.begin());
  behind_ = tokens - trail.drafted_[marks - 1];
}

void SegmentSource::collect_matches(const Segments& segments, Source source, std::int64_t offset,
                                    Evidence& evidence) const {
  const int aligned_rows = source == kHistory ? kAlignedRows : 0;  // of a side
  const int at = static_cast<int>(std::min<std::int64_t>(offset, UINT16_MAX));
  for (std::size_t s = 0; s < gaps_.size(); ++s) {
    const Segment& segment = segments[s];
    evidence.note_match_length(source, static_cast<std::uint8_t>(gaps_[s].depth()));
    segment.each_near(gaps_[s], std::min(rows_, Segment::most_near(gaps_[s])), [&](const Neighbour& row, int nearness) {
      const auto name =
          row.next_rank == Segment::kSeparator ? Evidence::kNoToken : evidence.name(segment.token(row.next_rank));
      const float vote = Evidence::vote(row.match_length, nearness);
      const float aligned = nearness < aligned_rows ? vote * Evidence::alignment(row.offset - at) : 0.0f;
      evidence.add_match(name, Match(row.match_length, source, epoch_id(s, row.epoch)), vote, aligned);
    });
  }
}

std::optional<WeighedMatch> SegmentSource::weighed_match(const Segments& segments) const {
  std::size_t longest = 0;
  for (std::size_t s = 1; s < gaps_.size(); ++s) {
    if (gaps_[s].depth() >= gaps_[longest].depth()) longest = s;
  }
  if (gaps_.empty() || gaps_[longest].depth() == 0) return {};
  const Segment& segment = segments[longest];
  const std::uint32_t nearest = gaps_[longest].nearest_row();
  const Row row = segment.row(nearest);
  if (!segment.has_alternatives() || row.next_rank == Segment::kSeparator) return {};
  const Match match(static_cast<std::uint8_t>(gaps_[longest].depth()), kHistory, epoch_id(longest, row.epoch));
  return WeighedMatch{match, segment.token(row.next_rank), segment.alternatives(nearest)};
}

std::uint8_t SegmentSource::age(const Segments& segments, const Match& match, std::int64_t newest) {
  const std::uint16_t id = match.epoch_id();
  const std::int64_t epoch = segments[id / Rows::kEpochs].epoch(static_cast<std::uint8_t>(id % Rows::kEpochs));
  if (epoch >= newest) return 0;
  return static_cast<std::uint8_t>(
      std::min<std::uint64_t>(static_cast<std::uint64_t>(newest) - static_cast<std::uint64_t>(epoch), kOldest));
}

int SegmentSource::depth() const {
  int depth = 0;
  for (const RowGap& gap : gaps_) depth = std::max(depth, gap.depth());
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
