// A step: every session appends its new tokens, the estimators learn from them, and every session drafts.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "histospec/engine.h"
#include "threads/workers.h"
#include "upkeep/contents.h"

namespace histospec {

// Throws std::invalid_argument that names the first negative token.
void require_tokens(const std::string& field, Tokens tokens);

// Checks the request alone; StepRunner::run checks it against the sessions. Throws std::invalid_argument.
void check_step(const StepRequest& request);

class StepRunner {
 public:
  // `threads`: how many threads draft, the caller's included.
  StepRunner(int threads, MemoryLedger& ledger, Registry& registry, Contents& contents)
      : ledger_(ledger), registry_(registry), contents_(contents), ahead_(threads), workers_(threads) {}

  // As Engine::step(), for a request that check_step() has accepted.
  void run(const StepRequest& request, StepResult& result) REQUIRES(engine_lock);

 private:
  void find_batch(const StepRequest& request, std::vector<Outcome>& outcomes) REQUIRES(engine_lock);
  // `row`: the session's row in the report.
  void append(Session& session, Tokens came, const VerifiedReport& report, std::size_t row) REQUIRES(engine_lock);
  void count_places(Session& session, Tokens came) REQUIRES(engine_lock);
  void draft_all(DraftLimits limits) REQUIRES(engine_lock);
  // `ahead` is scratch space that moves along the draft and keeps its memory.
  static void draft_one(Session& session, DraftLimits limits, DraftContext& ahead) REQUIRES(engine_lock);

  MemoryLedger& ledger_;
  Registry& registry_;
  Contents& contents_;
  std::uint64_t number_ GUARDED_BY(engine_lock) = 0;          // of this step
  std::vector<Session*> batch_ GUARDED_BY(engine_lock);       // the sessions that step
  std::vector<std::uint32_t> rows_ GUARDED_BY(engine_lock);   // their rows in the request
  std::vector<std::uint32_t> order_ GUARDED_BY(engine_lock);  // of the batch, sorted by problem
  std::vector<DraftContext> ahead_ GUARDED_BY(engine_lock);   // scratch space of each worker
  Workers workers_ GUARDED_BY(engine_lock);
};

}  // namespace histospec
