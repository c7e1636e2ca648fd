// A tenant: namespaces that share a part of the memory budget. All belong to one tenant unless the caller assigns them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <list>

#include "registry/monitor.h"

namespace histospec {

struct Problem;

struct Tenant {
  // The most that it may hold, in bytes, even if the budget is not short.
  std::size_t most GUARDED_BY(engine_lock) = std::numeric_limits<std::size_t>::max();
  // What its namespaces hold, as booked by the ledger. Sessions count for their live text only.
  std::size_t bytes GUARDED_BY(engine_lock) = 0;
  // All its problems, each on one shelf, least recently used first. The evictor moves a problem that it finds in use to
  // the second shelf, and one in use that has no segments to the third, so that it passes each of them once, not in
  // every slice.
  enum Shelf : std::uint8_t { kRecent, kBusy, kBare };
  std::array<std::list<Problem*>, 3> shelves GUARDED_BY(engine_lock);
  // Those that have twins, least recently used first.
  std::list<Problem*> twinned GUARDED_BY(engine_lock);
  bool visited GUARDED_BY(engine_lock) = false;  // by the present pass of the evictor
};

}  // namespace histospec
