#include "index/segments.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <set>
#include <span>

namespace histospec {
namespace {

// The oldest epoch that the window of the newest `epochs` distinct ones keeps.
std::int64_t oldest_kept(const Segments::List& segments, int epochs) {
  std::set<std::int64_t> seen;
  std::optional<std::int64_t> last;
  for (const auto& segment : segments) {
    for (const auto& extent : segment->extents()) {
      if (extent.epoch == last) continue;
      last = extent.epoch;
      seen.insert(extent.epoch);
      if (seen.size() > static_cast<std::size_t>(epochs)) seen.erase(seen.begin());
    }
  }
  return seen.empty() ? 0 : *seen.begin();
}

std::shared_ptr<const Segment> merged(std::span<const std::shared_ptr<const Segment>> run, std::int64_t oldest,
                                      std::size_t most, LeftOut& evicted) {
  std::vector<Response> responses;
  for (const auto& segment : run) std::ranges::move(segment->responses(), std::back_inserter(responses));
  evicted.epochs += std::erase_if(responses, [oldest](const Response& r) { return r.epoch < oldest; });
  const std::size_t kept = std::min(responses.size(), most);
  evicted.responses += responses.size() - kept;
  std::vector<ResponseView> views;
  views.reserve(kept);
  for (const Response& r : std::span(responses).last(kept)) views.push_back(r.view());
  return Segment::build(views);
}

// How many of the newest segments to merge; 1: none.
std::size_t run_to_merge(const Segments::List& segments, const MergePolicy& policy) {
  std::size_t length = 0, tokens = 0, largest = 0;
  for (auto segment = segments.rbegin(); segment != segments.rend(); ++segment, ++length) {
    const std::size_t its = (*segment)->tokens();
    if (length > 0 && (its >= policy.growth * largest || tokens + its > policy.largest)) break;
    tokens += its;
    largest = std::max(largest, its);
  }
  return length >= (tokens <= policy.small ? policy.fan_in : 2) ? length : 1;
}

// Removes the oldest segments that hold none of the newest `most` responses.
void leave_out_oldest(Segments::List& segments, std::size_t most, LeftOut& evicted) {
  std::size_t newer = 0;
  for (auto segment = segments.end(); segment != segments.begin(); newer += (*segment)->extents().size()) {
    if (newer >= most) {
      std::for_each(segments.begin(), segment, [&](const auto& old) { evicted.responses += old->extents().size(); });
      segments.erase(segments.begin(), segment);
      return;
    }
    --segment;
  }
}

// Removes the segments outside of the window; returns the oldest epoch that the window keeps.
std::int64_t slide(Segments::List& segments, Window window, LeftOut& evicted) {
  const std::int64_t oldest = oldest_kept(segments, window.epochs);
  std::erase_if(segments, [&](const auto& segment) {
    const auto extents = segment->extents();
    const bool old = std::ranges::all_of(extents, [oldest](const auto& e) { return e.epoch < oldest; });
    if (old) evicted.epochs += extents.size();
    return old;
  });
  leave_out_oldest(segments, window.responses, evicted);
  return oldest;
}

}  // namespace

std::size_t Segments::tokens() const {
  std::size_t n = 0;
  for (const auto& segment : list_) n += segment->tokens();
  return n;
}

std::size_t Segments::bytes() const {
  constexpr std::size_t kShared = 32;  // of the shared pointer to this object
  std::size_t n = sizeof(*this) + kShared + list_.capacity() * sizeof(List::value_type);
  for (const auto& segment : list_) n += segment->bytes();
  return n;
}

std::shared_ptr<const Segments> with_segment(const Segments& segments, std::shared_ptr<const Segment> fresh,
                                             Window window, LeftOut& evicted, MergePolicy policy) {
  Segments::List out = segments.list();
  out.push_back(std::move(fresh));
  const std::int64_t oldest = slide(out, window, evicted);
  for (std::size_t run; (run = run_to_merge(out, policy)) > 1;) {
    auto all = merged(std::span(out).last(run), oldest, window.responses, evicted);
    out.resize(out.size() - run);
    out.push_back(std::move(all));
  }
  return std::make_shared<const Segments>(std::move(out));
}

std::shared_ptr<const Segments> with_stored(const Segments& segments, std::shared_ptr<const Segment> stored,
                                            Window window, LeftOut& evicted) {
  Segments::List out = segments.list();
  out.insert(out.begin(), std::move(stored));
  slide(out, window, evicted);
  return std::make_shared<const Segments>(std::move(out));
}

}  // namespace histospec
