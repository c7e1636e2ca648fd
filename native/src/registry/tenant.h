// A tenant: namespaces that share a part of the memory budget. All belong to one tenant unless the caller assigns them.
#pragma once

#include <cstddef>
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
  // Least recently used first: all its problems, and those that have twins.
  std::list<Problem*> recency GUARDED_BY(engine_lock);
  std::list<Problem*> twinned GUARDED_BY(engine_lock);
  bool visited GUARDED_BY(engine_lock) = false;  // by the present pass of the evictor
};

}  // namespace histospec
