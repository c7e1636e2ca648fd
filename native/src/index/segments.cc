#include "index/segments.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <set>
#include <span>

namespace histospec {
namespace {

// The oldest epoch that the window of the newest `epochs` distinct ones keeps.
std::int64_t oldest_kept(const Segments::List& segments, std::span<const ResponseView> fresh, int epochs) {
  std::set<std::int64_t> seen;
  std::optional<std::int64_t> last;
  const auto see = [&](std::int64_t epoch) {
    if (epoch == last) return;
    last = epoch;
    seen.insert(epoch);
    if (seen.size() > static_cast<std::size_t>(epochs)) seen.erase(seen.begin());
  };
  for (const auto& segment : segments) {
    for (const auto& extent : segment->extents()) see(extent.epoch);
  }
  for (const ResponseView& r : fresh) see(r.epoch);
  return seen.empty() ? 0 : *seen.begin();
}

std::size_t tokens_of(std::span<const ResponseView> responses) {
  std::size_t n = 0;
  for (const ResponseView& r : responses) n += r.tokens.size();
  return n;
}

// How many of the newest segments to merge with the responses after them, if there are any.
std::size_t run_to_merge(const Segments::List& segments, std::span<const ResponseView> after,
                         const MergePolicy& policy) {
  const std::size_t merged_with = after.empty() ? 0 : 1;
  std::size_t length = merged_with, tokens = tokens_of(after), largest = tokens;
  for (auto segment = segments.rbegin(); segment != segments.rend(); ++segment, ++length) {
    const std::size_t its = (*segment)->tokens();
    if (length > 0 && (its >= policy.growth * largest || tokens + its > policy.largest)) break;
    tokens += its;
    largest = std::max(largest, its);
  }
  return length >= (tokens <= policy.small ? policy.fan_in : 2) ? length - merged_with : 0;
}

// Removes the oldest segments that hold none of the newest `most` responses; `newer` responses come after them.
void leave_out_oldest(Segments::List& segments, std::size_t newer, std::size_t most, LeftOut& evicted) {
  for (auto segment = segments.end(); segment != segments.begin(); newer += (*segment)->extents().size()) {
    if (newer >= most) {
      std::for_each(segments.begin(), segment, [&](const auto& old) { evicted.responses += old->extents().size(); });
      segments.erase(segments.begin(), segment);
      return;
    }
    --segment;
  }
}

// Removes the segments outside of the window, before the `fresh` responses. Returns the oldest epoch that it keeps.
std::int64_t slide(Segments::List& segments, std::span<const ResponseView> fresh, Window window, LeftOut& evicted) {
  const std::int64_t oldest = oldest_kept(segments, fresh, window.epochs);
  std::erase_if(segments, [&](const auto& segment) {
    const auto extents = segment->extents();
    const bool old = std::ranges::all_of(extents, [oldest](const auto& e) { return e.epoch < oldest; });
    if (old) evicted.epochs += extents.size();
    return old;
  });
  leave_out_oldest(segments, fresh.size(), window.responses, evicted);
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

std::shared_ptr<const Segments> with_responses(const Segments& segments, std::span<const ResponseView> fresh,
                                               Window window, LeftOut& evicted, MergePolicy policy) {
  Segments::List out = segments.list();
  const std::int64_t oldest = slide(out, fresh, window, evicted);
  const auto old = [oldest](const ResponseView& r) { return r.epoch < oldest; };
  std::vector<ResponseView> newest(fresh.begin(), fresh.end());  // of which one segment is built
  if (std::ranges::all_of(newest, old)) {
    evicted.epochs += newest.size();
    newest.clear();
  }
  std::vector<std::vector<Response>> restored;  // what `newest` points to
  while (const std::size_t run = run_to_merge(out, newest, policy)) {
    std::vector<Response>& responses = restored.emplace_back();
    for (const auto& segment : std::span(out).last(run)) {
      std::ranges::move(segment->responses(), std::back_inserter(responses));
    }
    out.resize(out.size() - run);
    std::vector<ResponseView> merged;
    for (const Response& r : responses) merged.push_back(r.view());
    merged.insert(merged.end(), newest.begin(), newest.end());
    evicted.epochs += std::erase_if(merged, old);
    const std::size_t kept = std::min(merged.size(), window.responses);
    evicted.responses += merged.size() - kept;
    newest.assign(merged.end() - static_cast<std::ptrdiff_t>(kept), merged.end());
  }
  if (!newest.empty()) out.push_back(Segment::build(newest));
  return std::make_shared<const Segments>(std::move(out));
}

std::shared_ptr<const Segments> with_stored(const Segments& segments, std::shared_ptr<const Segment> stored,
                                            Window window, LeftOut& evicted) {
  Segments::List out = segments.list();
  out.insert(out.begin(), std::move(stored));
  slide(out, {}, window, evicted);
  return std::make_shared<const Segments>(std::move(out));
}

}  // namespace histospec
