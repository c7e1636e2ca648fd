#include "engine/report.h"

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace histospec {
namespace {

std::string entry(const char* field, std::size_t b) { return std::string(field) + "[" + std::to_string(b) + "]"; }

void check_counts(const char* field, std::span<const std::int32_t> counts, std::size_t batch, std::int32_t most) {
  if (counts.size() != batch) {
    throw std::invalid_argument(std::string(field) + ": has " + std::to_string(counts.size()) + " entries, must have " +
                                std::to_string(batch) + " (one per session)");
  }
  for (std::size_t b = 0; b < batch; ++b) {
    if (counts[b] >= 0 && counts[b] <= most) continue;
    throw std::invalid_argument(entry(field, b) + ": is " + std::to_string(counts[b]) + ", must lie in [0, " +
                                std::to_string(most) + "]");
  }
}

}  // namespace

void check_report(const VerifiedReport& report, std::size_t batch) {
  const bool model = !report.model_drafted.empty() || !report.model_accepted.empty();
  if (report.verified.empty() && !model) return;
  check_counts("verified", report.verified, batch, kMaxDraft);
  if (!model) return;
  check_counts("model_drafted", report.model_drafted, batch, INT32_MAX);
  check_counts("model_accepted", report.model_accepted, batch, INT32_MAX);
  for (std::size_t b = 0; b < batch; ++b) {
    if (report.model_accepted[b] <= report.model_drafted[b]) continue;
    throw std::invalid_argument(entry("model_accepted", b) + ": is " + std::to_string(report.model_accepted[b]) +
                                ", more than " + entry("model_drafted", b) + ", " +
                                std::to_string(report.model_drafted[b]));
  }
}

Verified Verified::of(const VerifiedReport& report, std::size_t b, std::size_t drafted) {
  if (report.verified.empty()) return {false, drafted};
  Verified row{true, std::min<std::size_t>(report.verified[b], drafted)};
  if (!report.model_drafted.empty()) {
    row.model = report.model_drafted[b];
    row.model_accepted = report.model_accepted[b];
  }
  return row;
}

}  // namespace histospec
