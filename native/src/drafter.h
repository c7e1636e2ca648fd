// The drafter: extends a path token by token while it pays.
#pragma once

#include <array>
#include <vector>

#include "estimator.h"
#include "sources.h"

namespace histospec {

// One drafted position, kept until the engine says which token came.
struct Prediction {
  Estimator::Features features;
  std::array<Token, kMaxCandidates> tokens;
  std::array<float, kMaxCandidates> probabilities;
  std::uint8_t best;  // of the candidates: the one that was drafted, if any was
  Source source;      // of the best
  std::uint8_t age;   // of the response that it comes from, if that is history

  Token token() const { return tokens[best]; }
};

// What was drafted for a session, and what there is to learn from it: one prediction a drafted token, and perhaps one
// more for the position at which it stopped.
struct Draft {
  std::vector<Token> tokens;
  std::vector<float> probabilities;
  std::vector<Prediction> predictions;

  void clear() {
    tokens.clear();
    probabilities.clear();
    predictions.clear();
  }
};

struct DraftLimits {
  int max_tokens;
  float verify_cost;         // marginal cost of verifying one drafted token, in units of a plain decoding step
  float tail_weight = 1.0f;  // what a step saved is worth where a session is expected to be long
};

// What a session looks at when it drafts.
struct Viewpoint {
  ContextTail context;
  HistorySource history;       // of the problem
  HistorySource elsewhere{8};  // of the whole namespace: rarely asked
  std::int64_t generated = 0;  // tokens of the session so far
  int run = 0;                 // the last so many of them were foreseen
  std::int64_t newest = 0;     // epoch of the namespace

  // Moves what will be asked to the end of the context. Returns the longest context that the history knows.
  int catch_up();
};

// What is said on the token after view.context, its candidates elected.
Evidence gather(Viewpoint& view, const LiveSource& live);

// Drafts for a session: at each position the most probable candidate, while the probability that all of it is accepted
// stays worth its cost. `view` is moved along the draft; `draft` is overwritten.
void draft(Viewpoint& view, const LiveSource& live, const Estimator& estimator, DraftLimits limits, Draft& draft);

// Trains the estimator with what came instead of (or as) the predictions, and counts view.run. Returns how many drafted
// tokens were accepted.
int learn(Estimator& estimator, const Draft& draft, Tokens came, Viewpoint& view);

}  // namespace histospec
