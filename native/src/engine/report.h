// The reports of workers with a drafter of their own: which drafted tokens they verified.
#pragma once

#include <cstddef>

#include "histospec/engine.h"

namespace histospec {

// Throws std::invalid_argument unless the report has valid counts for each session.
void check_report(const VerifiedReport& report, std::size_t batch);

// What the worker verified for one session together with its new tokens.
struct Verified {
  bool reported;          // false: the worker has no other drafter
  std::size_t server;     // verified tokens of the engine's draft, from the first on
  std::size_t model = 0;  // verified tokens of the worker's own drafter
  std::size_t model_accepted = 0;

  // Row b of a report; without a report, the whole draft of `drafted` tokens. A session that was opened anew since the
  // draft that the worker verified has no draft.
  static Verified of(const VerifiedReport& report, std::size_t b, std::size_t drafted);
};

}  // namespace histospec
