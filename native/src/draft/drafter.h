// The drafter: extends a path token by token while it pays.
#pragma once

#include <array>
#include <vector>

#include "draft/estimator.h"
#include "draft/sources.h"
#include "draft/twin_trust.h"

namespace histospec {

// What was estimated for one position, kept until the engine says which token came.
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

// What was drafted for a session, and what there is to learn from it: one prediction a position at which evidence was
// gathered, perhaps one more for that at which it stopped.
struct Draft {
  std::vector<Token> tokens;
  std::vector<float> probabilities;
  std::vector<Origin> origins;
  std::vector<Prediction> predictions;
  Trail history;
  Trail elsewhere;

  void clear() {
    tokens.clear();
    probabilities.clear();
    origins.clear();
    predictions.clear();
    history.clear();
    elsewhere.clear();
  }
};

struct DraftLimits {
  int max_tokens;
  float verify_cost;  // marginal cost of verifying one drafted token, in units of a plain decoding step
};

// What a session looks at when it drafts.
struct Viewpoint {
  ContextTail context;
  HistorySource history;          // of the problem
  HistorySource elsewhere{8, 3};  // of the whole namespace: rarely asked, and not for much
  std::int64_t generated = 0;     // tokens of the session so far
  int run = 0;                    // the last so many of them were foreseen
  std::int64_t newest = 0;        // epoch of the namespace
  Tokens twin;                    // none: empty
  std::int64_t shift = 0;         // how far ahead of the session it is followed
  Agreement agreement;            // with it

  // Moves what will be asked to the end of the context. Returns the longest context that the history knows.
  int catch_up();
  // The session has one more generated token.
  void push(Token token) {
    if (const Token* foretold = next_of_twin()) agreement.saw(*foretold == token);
    context.push(token);
    ++generated;
    if (agreement.streak < kInStep && !twin.empty()) synchronise();
  }
  // What the twin says next; null past its end.
  const Token* next_of_twin() const {
    const std::int64_t at = generated + shift;
    return at >= 0 && at < static_cast<std::int64_t>(twin.size()) ? &twin[at] : nullptr;
  }

 private:
  // Tokens that have to agree before a twin is followed elsewhere, and how far away that may be.
  static constexpr int kInStep = 4, kReach = 64;
  // Follows the twin from the nearest place where the last tokens stand in it, too, if there is one.
  void synchronise();
};

// What is said on the token after view.context, its candidates elected.
Evidence gather(Viewpoint& view, const LiveSource& live);

// Whether the next token is drafted from the twin without asking anybody else.
bool twin_alone(const Viewpoint& view, const TwinTrust& trust);

// Drafts for a session: at each position the most probable candidate, while the probability that all of it is accepted
// stays worth its cost. `view` is moved along the draft; `draft` is overwritten.
void draft(Viewpoint& view, const LiveSource& live, const Estimator& estimator, const TwinTrust& trust,
           DraftLimits limits, Draft& draft);

// Trains the estimator with what came instead of (or as) the predictions, and counts view.run. Returns how many drafted
// tokens were accepted.
int learn(Estimator& estimator, const Draft& draft, Tokens came, Viewpoint& view);

}  // namespace histospec
