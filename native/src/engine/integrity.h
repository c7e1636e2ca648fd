// The invariants of an engine, which hold whenever no thread holds its lock.
#pragma once

#include "registry/registry.h"

namespace histospec {

// Counts everything again and compares it with the ledger. Throws std::logic_error naming the invariant that fails.
void check_books(const Registry& registry, const MemoryLedger& ledger) REQUIRES(engine_lock);

}  // namespace histospec
