// The drafter: extends a path token by token while it pays.
#pragma once

#include <array>
#include <vector>

#include "draft/estimator.h"
#include "draft/sources.h"
#include "draft/twin_trust.h"

namespace histospec {

// What the estimator said of one position, kept until the engine knows which token came.
struct Prediction {
  std::size_t position;  // in the draft; at its end: where it stopped
  Estimator::Features features;
  std::array<Token, kMaxCandidates> tokens;
  std::array<float, kMaxCandidates> probabilities;
  std::uint8_t best;  // of the candidates

  Token token() const { return tokens[best]; }
};

// Where a drafted token comes from.
struct Origin {
  Source source;
  std::uint8_t age;  // of the response, if that is history
};

// The draft of a session, and what the estimator can learn from it: one prediction for each position at which evidence
// was gathered, which may include the position at which the draft stopped.
struct Draft {
  std::vector<Token> tokens;
  std::vector<float> probabilities;
  std::vector<Origin> origins;
  std::vector<Prediction> predictions;
  Trail history_trail;
  Trail namespace_trail;

  void clear() {
    tokens.clear();
    probabilities.clear();
    origins.clear();
    predictions.clear();
    history_trail.clear();
    namespace_trail.clear();
  }
};

struct DraftLimits {
  int max_tokens;
  float verify_cost;  // marginal cost of verifying one drafted token, in units of a plain decoding step
};

// What a draft is made from: the end of a session's text, and the sources that follow it.
struct DraftContext {
  ContextTail tail;
  SegmentSource history_source;          // of the problem
  SegmentSource namespace_source{8, 3};  // of the whole namespace; rarely used, so: low patience, few rows
  std::int64_t generated = 0;            // tokens of the session so far
  int run = 0;                           // the last so many of them were foreseen
  std::int64_t newest = 0;               // epoch of the namespace
  Tokens twin;                           // empty: none
  std::int64_t shift = 0;                // position in the twin minus position in the session
  Agreement agreement;                   // with the twin

  // Moves the sources that the next token needs to the end of the context. Returns the history's longest match length.
  int catch_up();
  // The session has one more generated token.
  void push(Token token) {
    if (const Token* foretold = next_of_twin()) agreement.saw(*foretold == token);
    tail.push(token);
    ++generated;
    if (agreement.streak < kInStep && !twin.empty()) synchronise();
  }
  // The next token of the twin; null past its end.
  const Token* next_of_twin() const {
    const std::int64_t at = generated + shift;
    return at >= 0 && at < static_cast<std::int64_t>(twin.size()) ? &twin[at] : nullptr;
  }

 private:
  // Tokens that must agree before the twin is followed at another position, and how far away that position may be.
  static constexpr int kInStep = 4, kReach = 64;
  // Follows the twin from the nearest position where the session's last tokens stand in it, if there is one.
  void synchronise();
};

// Collects the matches of the context, and picks the candidates for its next token.
Evidence gather(DraftContext& context, const LiveSource& live);

// Whether the next token is drafted from the twin alone, without evidence.
bool twin_alone(const DraftContext& context, const TwinTrust& trust);

// Drafts for a session: at each position the most probable candidate, while the probability that the whole draft is
// accepted stays worth its cost. Moves `context` along the draft; overwrites `draft`.
void draft(DraftContext& context, const LiveSource& live, const Estimator& estimator, const TwinTrust& trust,
           DraftLimits limits, Draft& draft);

// Trains the estimator with the tokens that came, against the predictions of the draft, and counts context.run. Returns
// how many tokens the draft and they begin with in common.
int learn(Estimator& estimator, const Draft& draft, Tokens came, DraftContext& context);

}  // namespace histospec
