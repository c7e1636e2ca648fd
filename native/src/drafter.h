// The drafter: extends a path token by token while it pays.
#pragma once

#include <array>
#include <vector>

#include "estimator.h"
#include "sources.h"

namespace histospec {

// The candidates of one drafted position, kept until the engine says which token came.
struct Prediction {
  int size = 0;
  std::array<Token, kMaxCandidates> tokens;
  std::array<float, kMaxCandidates> probabilities;
  std::array<Estimator::Features, kMaxCandidates> features;
};

struct DraftLimits {
  int max_tokens;
  float verify_cost;  // marginal cost of verifying one drafted token, in units of a plain decoding step
};

// What a session looks at when it drafts.
struct Viewpoint {
  ContextTail context;
  HistorySource history;       // of the problem
  HistorySource elsewhere;     // of the whole namespace
  std::int64_t generated = 0;  // tokens of the session so far
};

// Appends a draft for the session to `tokens` and `probabilities`: at each position the most probable candidate, while
// the probability that all of it is accepted stays worth its cost. `predictions` is overwritten with what to learn
// from: one a drafted token, and one more for the position at which it stopped. `view` is moved along the draft: pass a
// copy.
void draft(Viewpoint& view, LiveSource live, const Estimator& estimator, DraftLimits limits, std::vector<Token>& tokens,
           std::vector<float>& probabilities, std::vector<Prediction>& predictions);

// Trains the estimator with what came instead of (or as) the predictions. Returns how many drafted tokens were
// accepted.
int learn(Estimator& estimator, std::span<const Prediction> predictions, std::size_t drafted, Tokens came);

}  // namespace histospec
