// What the history knows about how long responses become.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "registry/problem.h"

namespace histospec {

// Lengths in tokens of the responses that tell how long a session of this problem becomes once it has `generated`:
// those of the problem that are longer, or else of its namespace, whose latest ones are given. Ascending.
std::vector<std::int64_t> longer_responses(const Problem* problem, std::span<const std::int64_t> latest,
                                           std::int64_t generated) REQUIRES(engine_lock);

// The q-quantile, linear between neighbours, of ascending values, at least one.
double quantile(std::span<const std::int64_t> ascending, double q);

}  // namespace histospec
