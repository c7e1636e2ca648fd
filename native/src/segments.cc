#include "segments.h"

#include <algorithm>
#include <set>

namespace histospec {
namespace {

// The oldest epoch that the window of the newest `epochs` distinct ones keeps.
std::int64_t oldest_kept(const Segments& segments, int epochs) {
  std::set<std::int64_t> seen;
  for (const auto& segment : segments) {
    for (const auto& extent : segment->extents()) {
      seen.insert(extent.epoch);
      if (seen.size() > static_cast<std::size_t>(epochs)) seen.erase(seen.begin());
    }
  }
  return seen.empty() ? 0 : *seen.begin();
}

std::shared_ptr<const Segment> merged(const Segment& a, const Segment& b, std::int64_t oldest, std::size_t& evicted) {
  std::vector<Response> responses = a.responses();
  std::vector<Response> more = b.responses();
  responses.insert(responses.end(), std::make_move_iterator(more.begin()), std::make_move_iterator(more.end()));
  evicted += std::erase_if(responses, [oldest](const Response& r) { return r.epoch < oldest; });
  std::vector<ResponseView> views;
  views.reserve(responses.size());
  for (const Response& r : responses) views.push_back(r.view());
  return Segment::build(views);
}

}  // namespace

std::shared_ptr<const Segments> with_segment(const Segments& segments, std::shared_ptr<const Segment> fresh, int epochs,
                                             std::size_t& evicted, MergePolicy policy) {
  auto out = std::make_shared<Segments>(segments);
  out->push_back(std::move(fresh));
  const std::int64_t oldest = oldest_kept(*out, epochs);
  std::erase_if(*out, [&](const auto& segment) {
    const auto extents = segment->extents();
    const bool old = std::ranges::all_of(extents, [oldest](const auto& e) { return e.epoch < oldest; });
    if (old) evicted += extents.size();
    return old;
  });
  while (out->size() > 1) {
    const auto& newer = out->back();
    const auto& older = *(out->end() - 2);
    if (older->tokens() >= policy.growth * newer->tokens()) break;
    if (older->tokens() + newer->tokens() > policy.largest) break;
    auto both = merged(*older, *newer, oldest, evicted);
    out->pop_back();
    out->back() = std::move(both);
  }
  return out;
}

}  // namespace histospec
