// A namespace: its problems, what they share, and what is counted of them.
#pragma once

#include <cstdint>
#include <list>
#include <string>
#include <vector>

#include "draft/estimator.h"
#include "draft/twin_trust.h"
#include "histospec/engine.h"
#include "index/namespace_index.h"
#include "registry/monitor.h"
#include "registry/problem.h"
#include "registry/prompts.h"

namespace histospec {

struct Namespace {
  // Responses whose lengths stand for a problem that has none.
  static constexpr std::size_t kLatestLengths = 256;

  Namespace(std::string its_name, std::size_t index_tokens) : name(std::move(its_name)), index(index_tokens) {
    latest_lengths.reserve(kLatestLengths);
  }

  const std::string name;
  Estimator estimator GUARDED_BY(engine_lock);
  TwinTrust trust GUARDED_BY(engine_lock);
  NamespaceIndex index;                             // guarded, but for merge()
  bool merging GUARDED_BY(engine_lock) = false;     // its index
  NamespaceStats counters GUARDED_BY(engine_lock);  // what is counted; what is held, the ledger has
  Problems problems GUARDED_BY(engine_lock);
  std::list<Problem*> members GUARDED_BY(engine_lock);  // the same, those first that a drop has not visited
  Prompts prompts GUARDED_BY(engine_lock);              // of the problems
  std::vector<std::int64_t> latest_lengths GUARDED_BY(engine_lock);  // oldest first
  bool emptied GUARDED_BY(engine_lock) = false;  // dropped, and nothing has come since: it goes with its last session

  // The ledger's.
  Holding held GUARDED_BY(engine_lock);            // by its problems and itself
  std::size_t booked GUARDED_BY(engine_lock) = 0;  // of its bytes(), in `held`
  bool gone GUARDED_BY(engine_lock) = false;       // erased, though somebody may still hold it

  std::size_t bytes() const REQUIRES(engine_lock);
  // `stored`: it is older than those that were seen before.
  void saw_response(std::size_t tokens, std::int64_t epoch, bool stored = false) REQUIRES(engine_lock);
  // Gives up what its problems taught: all but what was counted.
  void forget() REQUIRES(engine_lock);
};

}  // namespace histospec
