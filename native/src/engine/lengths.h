// The lengths of earlier responses, to predict the length of a running one.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "registry/problem.h"

namespace histospec {

// Lengths in tokens, ascending, of the problem's responses that are longer than `generated`; if there are none, of the
// `latest` lengths of its namespace that are longer.
std::vector<std::int64_t> longer_responses(const Problem* problem, std::span<const std::int64_t> latest,
                                           std::int64_t generated) REQUIRES(engine_lock);

// The q-quantile of at least one ascending value, linear between neighbours.
double quantile(std::span<const std::int64_t> ascending, double q);

}  // namespace histospec
