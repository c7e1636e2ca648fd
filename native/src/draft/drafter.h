// The drafter: extends a draft token by token while it pays.
#pragma once

#include <array>
#include <vector>

#include "draft/estimator.h"
#include "draft/noise.h"
#include "draft/sources.h"
#include "draft/twins.h"

namespace histospec {

// The estimates for one position, kept until the engine knows its token.
struct Prediction {
  Prediction() {}  // leaves the numbers as they are; predict() writes them

  std::size_t position;  // in the draft; the draft's length for the position where it stopped
  Estimator::Features features;
  std::array<Token, kMaxCandidates> tokens;
  std::array<float, kMaxCandidates> probabilities;
  std::uint8_t size;   // how many candidates there are; the estimator's come first
  std::uint8_t best;   // of the candidates
  std::uint8_t alone;  // the best without the noise
  bool foreseen;       // whether the noise of the candidates is known, and with it the contenders
  Foresight::Contenders contenders;

  Token token() const { return tokens[best]; }
};

// The source of a drafted token.
struct Origin {
  Source source;
  std::uint8_t age;  // of the response, if the source is history
};

// The draft of a session, and one prediction for each position with evidence, from which the estimator learns. The last
// prediction may be for the position where the draft stopped.
struct Draft {
  std::vector<Token> tokens;
  std::vector<float> probabilities;
  std::vector<Origin> origins;
  std::vector<Prediction> predictions;
  Trail history_trail;
  Trail namespace_trail;

  // Writes, for each drafted token, the most probable other candidate of its place, or -1 and 0.
  void runners_up(std::span<Token> others, std::span<float> their_probabilities) const;

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

// The end of a session's text, and where it stands in its sources.
struct DraftContext {
  ContextTail tail;
  SegmentSource history_source;          // over the problem
  SegmentSource namespace_source{8, 3};  // over the namespace; rarely used, so with low patience and few rows
  std::int64_t generated = 0;            // tokens that the session has generated
  int run = 0;                           // how many of the last ones were predicted, without a gap
  std::int64_t newest = 0;               // newest epoch of the namespace
  std::int64_t shift = 0;                // position in the twin minus position in the session
  Agreement agreement;                   // with the twin
  NoiseAhead noise;                      // along the draft, if the noise is known

  // Moves the sources that the next token needs to the end of the context. Returns the longest match length in the
  // history.
  int catch_up(const DraftSources& sources);
  // Appends a generated token to the context.
  void push(Token token, Tokens twin) {
    if (const Token* foretold = next_of(twin)) agreement.saw(*foretold == token);
    tail.push(token);
    noise.push(token);
    ++generated;
    if (agreement.streak < kInStep && !twin.empty()) synchronise(twin);
  }
  // The next token of the twin; null past its end.
  const Token* next_of(Tokens twin) const {
    const std::int64_t at = generated + shift;
    return at >= 0 && at < static_cast<std::int64_t>(twin.size()) ? &twin[at] : nullptr;
  }

 private:
  // How many tokens must agree to follow the twin at another position, and how far away that position may be.
  static constexpr int kInStep = 4, kReach = 64;
  // Follows the twin from the nearest position behind the session's last kInStep tokens, if the twin contains them.
  void synchronise(Tokens twin);
};

// Collects the matches of the context, and picks the candidates for its next token.
Evidence gather(DraftContext& context, const DraftSources& sources);

// Estimates the candidates of the context's next token; `evidence` has at least one. `foresees`: whether to use the
// noise where it is known. Returns the calibrated probability of the best.
float predict(const Evidence& evidence, const DraftContext& context, const DraftSources& sources,
              const Estimator& estimator, bool foresees, Prediction& prediction);

// Trains the estimator on the token that came at the predicted position.
void learn(Estimator& estimator, const Prediction& prediction, Token came);

// Whether the twin alone gives the next token, without evidence from other sources.
bool twin_alone(const DraftContext& context, Tokens twin, const TwinTrust& trust);

// Drafts for a session: takes the most probable candidate at each position, as long as the draft's probability of being
// accepted as a whole pays for the next token. Moves `context` along the draft and overwrites `draft`.
void draft(DraftContext& context, const DraftSources& sources, const Estimator& estimator, const TwinTrust& trust,
           DraftLimits limits, Draft& draft);

// Trains the estimator on the tokens that came, at the predictions of the draft, and updates context.run. Returns the
// length of the common prefix of the draft and these tokens.
int learn(Estimator& estimator, const Draft& draft, Tokens came, DraftContext& context);

}  // namespace histospec
