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
  StepRunner(int threads, Contents& contents) : contents_(contents), ahead_(threads), workers_(threads) {}

  // As Engine::step(), for a request that check_step() has accepted.
  void run(const StepRequest& request, StepResult& result) REQUIRES(engine_lock);

 private:
  // A session that steps.
  struct Stepping {
    Session* session;
    std::size_t row;  // in the request
    Tokens twin;      // valid under the lock, which frees twins
  };

  void find_batch(const StepRequest& request, std::vector<Outcome>& outcomes) REQUIRES(engine_lock);
  void append(const Stepping& stepping, Tokens came, const VerifiedReport& report, float verify_cost)
      REQUIRES(engine_lock);
  void count_noise(Session& session, Tokens came) REQUIRES(engine_lock);
  void draft_all(DraftLimits limits) REQUIRES(engine_lock);
  // `ahead` is scratch space that moves along the draft and keeps its memory.
  static void draft_one(const Stepping& stepping, DraftLimits limits, DraftContext& ahead) REQUIRES(engine_lock);

  Contents& contents_;
  std::uint64_t number_ GUARDED_BY(engine_lock) = 0;  // of this step
  std::vector<Stepping> batch_ GUARDED_BY(engine_lock);
  std::vector<std::uint32_t> order_ GUARDED_BY(engine_lock);  // of the batch, sorted by problem
  std::vector<DraftContext> ahead_ GUARDED_BY(engine_lock);   // scratch space of each worker
  Workers workers_ GUARDED_BY(engine_lock);
};

}  // namespace histospec
