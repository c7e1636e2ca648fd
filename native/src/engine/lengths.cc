#include "engine/lengths.h"

#include <algorithm>
#include <cmath>

namespace histospec {

std::vector<std::int64_t> longer_responses(const Problem* problem, std::span<const std::int64_t> latest,
                                           std::int64_t generated) {
  std::vector<std::int64_t> lengths;
  const auto saw = [&](std::int64_t length) {
    if (length > generated) lengths.push_back(length);
  };
  if (problem) {
    for (const auto& segment : *problem->segments) {
      for (const auto& extent : segment->extents()) saw(extent.end - extent.start);
    }
    if (problem->live) {
      for (const ResponseView& r : problem->live->finished()) saw(static_cast<std::int64_t>(r.tokens.size()));
    }
  }
  if (lengths.empty()) std::ranges::for_each(latest, saw);
  std::ranges::sort(lengths);
  return lengths;
}

double quantile(std::span<const std::int64_t> ascending, double q) {
  const double rank = q * static_cast<double>(ascending.size() - 1);
  const auto low = static_cast<std::size_t>(std::floor(rank));
  const auto a = static_cast<double>(ascending[low]);
  const auto b = static_cast<double>(ascending[std::min(low + 1, ascending.size() - 1)]);
  return a + (b - a) * (rank - static_cast<double>(low));
}

}  // namespace histospec
