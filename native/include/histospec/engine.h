// The engine of one shard: history, live text and drafts of all its namespaces.
//
// Threads. Every method may be called from any thread. One mutex guards the maps, the sessions and the live text.
// Threads get it in the order in which they ask for it. A step holds it for the whole batch: 256 sessions, or 16,384
// new tokens, take a few milliseconds, so callers that share an engine send at most that much at once. Every other
// method holds it for a few milliseconds at a time and releases it in between (see lock_times()). Segments are
// immutable. The caller of ingest() builds its segment without the lock, and one builder thread builds those of
// committed responses. A step therefore never waits while an index is built.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "histospec/options.h"
#include "histospec/stats.h"
#include "histospec/types.h"

namespace histospec {

// The longest draft that a caller may ask for.
inline constexpr int kMaxDraft = 1024;

// What a worker with a drafter of its own verified for each session: a prefix of the engine's last draft, or tokens of
// its own drafter. Empty spans: the worker has no other drafter and verified every draft in full.
struct VerifiedReport {
  std::span<const std::int32_t> verified;        // B: verified tokens of the session's last draft, at most kMaxDraft
  std::span<const std::int32_t> model_drafted;   // B, or empty: verified tokens of the worker's drafter since then
  std::span<const std::int32_t> model_accepted;  // B, or empty: how many of these it accepted
};

struct StepRequest {
  std::span<const SessionId> sessions;      // B, each at most once
  Tokens tokens;                            // T, flat
  std::span<const std::int64_t> offsets;    // B + 1, ascending from 0 to T
  std::span<const std::int64_t> positions;  // empty, or B: generated tokens before these
  int max_tokens = 16;                      // at most kMaxDraft
  float verify_cost = 0.05f;
  // If given, sessions that cannot step are left out instead of raising: sessions that are not open, that have fewer
  // tokens than their position says, or that would have more tokens than this. It requires `positions`.
  std::optional<std::int64_t> most_tokens;
  VerifiedReport report = {};
  bool runners_up = false;  // whether the result has them
};

// What became of a session in a step.
enum class Outcome : std::uint8_t { kStepped, kUnknown, kTooLong };

struct StepResult {
  std::vector<Token> tokens;
  std::vector<std::int64_t> offsets;  // B + 1
  std::vector<float> probabilities;   // one per token: of being accepted, given that all before it were
  std::vector<Outcome> outcomes;      // B if most_tokens was given, else empty
  // If asked for, one per token: the most probable of the other tokens in its place, or -1, and its probability.
  std::vector<Token> runners_up;
  std::vector<float> runner_up_probabilities;
};

struct Opened {
  SessionId id;               // never used for another session
  std::size_t prompt_length;  // how many tokens of the prompt identify the problem: fewer than all in a later turn
  bool known;                 // whether the index holds finished responses of the problem
};

struct LengthPrediction {
  std::vector<double> lengths;  // one per quantile
  std::size_t observations = 0;
};

// The namespaces that have finished responses to some of the `asked` prompts, and to how many; in no order.
struct SharedPrompts {
  std::size_t asked = 0;
  std::vector<std::pair<std::string, std::size_t>> namespaces;
};

class Engine {
 public:
  explicit Engine(EngineOptions options = {});
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Adds finished responses to the history of the problem; they are in the index on return. `id` identifies the
  // problem, or the prompt does if `id` is empty. A response with a seed becomes the twin of later sessions with that
  // seed. Throws std::invalid_argument and changes nothing if a token is negative, the namespace or the prompt is
  // empty, a mask has another length than its response, or alternatives do not fit their response.
  void ingest(const std::string& name, Tokens prompt, std::span<const ResponseView> responses,
              const std::string& id = {}, Arrival arrival = Arrival::kNew);

  // Opens a session after `prompt`; `generated` is what it generated before. Without an id, an unknown prompt that
  // consists of the prompt of a known problem and the beginning of one of its responses is a later turn. The session
  // then belongs to the problem with the longest such prompt, and so will its response. The siblings of a session are
  // the other open sessions of its problem. With the `seed` of coupled sampling, the session drafts first from its
  // twin: the newest response of the problem with the same seed and a prompt of the same length. `position_noise`: the
  // seed's noise is that of vLLM's model runner V2. Throws std::invalid_argument.
  Opened open(const std::string& name, Tokens prompt, const std::string& id = {}, Tokens generated = {},
              std::optional<std::int64_t> seed = {}, bool position_noise = false);

  // Appends what each session generated, learns from it, and drafts. If `positions` says that a session has some of the
  // tokens already, it appends the rest. Throws UnknownSession or std::invalid_argument and changes nothing. Overwrites
  // `result`, and reuses its memory.
  void step(const StepRequest& request, StepResult& result);

  // Ends a session. With `commit` its generated tokens join the history of its problem at once, with the given epoch or
  // else the newest of the namespace, and with their alternatives (index/alternatives.h). Throws UnknownSession, or
  // std::invalid_argument if the alternatives do not fit the tokens, and changes nothing.
  //
  // With `expected_length`, it returns the generated tokens. If their number is another, it ends the session without a
  // commit and returns nothing, as it does for a session that is not open.
  std::optional<std::vector<Token>> close(SessionId session, bool commit = true, std::optional<std::int64_t> epoch = {},
                                          std::span<const std::uint8_t> alternatives = {},
                                          std::optional<std::size_t> expected_length = {});

  // How many tokens each session has generated; -1 for a session that is not open.
  std::vector<std::int64_t> lengths(std::span<const SessionId> sessions) const;
  // Throws UnknownSession.
  std::vector<Token> generated(SessionId session) const;

  // The history of a problem as the index holds it, oldest segment first.
  std::vector<Response> history(const std::string& name, Tokens prompt, const std::string& id = {}) const;
  // Quantiles (linear between neighbours) of the lengths of the problem's responses that are longer than `generated`.
  // If there are none, of the latest such responses of the namespace; empty if there are none there either.
  LengthPrediction predict_length(const std::string& name, Tokens prompt, std::int64_t generated,
                                  std::span<const double> quantiles, const std::string& id = {}) const;
  // Whether the index holds finished responses of the problem.
  bool knows(const std::string& name, Tokens prompt, const std::string& id = {}) const;
  // Looks up the newest prompts of this namespace in the others, token by token: those of problems without an id, at
  // most `most`. It takes milliseconds. To stay within that time, it may miss a namespace that knows few of the prompts
  // if there are thousands of namespaces, and skips the last namespaces if the prompts are long.
  SharedPrompts shared_prompts(const std::string& name, std::size_t most = 64) const;

  // What the namespace's estimator has learned, for restore_estimator(); empty if it has learned nothing yet.
  std::string estimator(const std::string& name) const;
  // Throws std::invalid_argument and changes nothing if `state` is not such a state.
  void restore_estimator(const std::string& name, std::string_view state);

  // Forgets the history of the namespace; its sessions go on. Returns how many responses it forgot. With `keep_learned`
  // the namespace keeps its counters and what its estimator has learned.
  std::uint64_t drop_namespace(const std::string& name, bool keep_learned = false);

  // Gives a namespace to a tenant: from now on if the engine does not have the namespace, else once it was dropped. All
  // others belong to the tenant "". While memory is short, the engine evicts from the tenant furthest over its share:
  // the budget, divided by the number of tenants that hold something.
  void assign(const std::string& name, const std::string& tenant);
  // Limits the bytes of a tenant's history, even if memory is not short.
  void limit_tenant(const std::string& tenant, std::size_t bytes);
  // The bytes that each tenant holds.
  std::map<std::string, std::size_t> tenants() const;

  // Whether callers should delay their next commit: responses finish faster than they become segments, or the engine is
  // still evicting. Without the delay, running sessions and fresh responses could outgrow the budget.
  bool congested() const;
  // Whether the memory budget has ever evicted history of any problem.
  bool evicted() const;
  // Waits until the committed responses have become segments and the housekeeper has nothing to do.
  void wait_until_built();
  // Bytes of the index: segments, live text, sessions and their book-keeping.
  std::size_t memory_bytes() const;
  // The budget: `memory_bytes` of the options.
  std::size_t memory_budget() const;
  // The part of memory_bytes() that cannot be evicted: live text and sessions. Never waits for the lock.
  std::size_t running_bytes() const;
  std::map<std::string, NamespaceStats> stats() const;
  LockTimes lock_times() const;
  // As stats(), for servers with thousands of namespaces, and with the counters of dropped namespaces, so that sums
  // over all of them never fall.
  Counters counters() const;
  // Re-derives the invariants of everything that the engine holds; throws std::logic_error naming the first that fails.
  void check_integrity() const;

 private:
  class State;
  std::unique_ptr<State> state_;
};

}  // namespace histospec
