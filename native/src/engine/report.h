// What workers with a drafter of their own say they verified.
#pragma once

#include <cstddef>

#include "histospec/engine.h"

namespace histospec {

// Throws std::invalid_argument unless the report has a possible row for each session.
void check_report(const VerifiedReport& report, std::size_t batch);

// What was verified of one session with the tokens that come now.
struct Verified {
  bool reported;          // else the worker has no other drafter
  std::size_t server;     // tokens of its draft, from the first on
  std::size_t model = 0;  // tokens of the worker's own drafter
  std::size_t model_accepted = 0;

  // Row b of a report; without one, the whole draft of `drafted` tokens. The session may have been opened anew since
  // the draft that the worker verified: then it has none.
  static Verified of(const VerifiedReport& report, std::size_t b, std::size_t drafted);
};

}  // namespace histospec
