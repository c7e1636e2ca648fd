// The engine of one shard: history, live text and drafts of all its namespaces.
//
// Threads. Every method may be called from any thread. One mutex guards the maps, the sessions and the live text.
// Threads get it in the order in which they ask for it. A step holds it for the whole batch: 256 sessions, or 16,384
// new tokens, take a few milliseconds, so callers that share an engine send at most that much at once. Every other
// method holds it for a few milliseconds at a time and releases it in between (see lock_times()). Segments are
// immutable. The caller of ingest() builds its segment without the lock, and one builder thread builds those of
// committed responses. A step therefore never waits while an index is built.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "histospec/types.h"

namespace histospec {

using SessionId = std::int64_t;

inline constexpr int kMaxThreads = 64;

// The longest draft that a caller may ask for.
inline constexpr int kMaxDraft = 1024;

// The session is not open: it was closed, was never opened, or belongs to an earlier process.
class UnknownSession : public std::out_of_range {
 public:
  using std::out_of_range::out_of_range;
};

struct EngineOptions {
  // Memory budget of the index. Beyond it the engine evicts the least recently used problems first, then the oldest
  // segments of problems with running sessions. A larger budget gives more hits. What running sessions need stays.
  std::size_t memory_bytes = std::size_t{8} << 30;
  // The sliding window: how many of its newest epochs a problem keeps.
  int history_epochs = 8;
  // How many threads draft for one batch. The drafts do not depend on it.
  int threads = 1;
  // How many tokens of text the index over all problems of a namespace holds, 15 to 17 bytes each. 0: none. More text
  // helps where problems share it (tool calls, code), and in the first epoch. It makes lookups slower.
  std::size_t namespace_tokens = std::size_t{1} << 19;
  // About how many of its newest responses a problem keeps, whatever their epochs. The engine removes older segments as
  // a whole, and single responses when it merges their segment.
  std::size_t history_responses = 4096;
};

// Upper bounds of the buckets in LockTimes, in seconds.
inline constexpr std::array<double, 9> kLockBounds = {0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1};

// How long threads held the engine's lock at a time, in CPU seconds of the thread that held it, so that waiting for a
// core on a busy machine does not count. Buckets are not cumulative; the last one has no upper bound.
struct LockTimes {
  std::array<std::uint64_t, kLockBounds.size() + 1> counts{};
  double seconds = 0;  // their sum
  double longest = 0;
};

// The source of a drafted token: the source of its longest match, the twin, or the worker's own drafter.
inline constexpr std::array<const char*, 6> kSourceNames = {"history", "own", "siblings", "namespace", "twin", "model"};

// The age of the response that a token of history came from, in epochs behind the newest of its namespace.
inline constexpr std::array<const char*, 5> kAgeNames = {"0", "1", "2", "3", "4+"};

struct SourceStats {
  std::uint64_t draft_tokens = 0;
  std::uint64_t accepted_tokens = 0;
};

struct NamespaceStats {
  std::uint64_t lookups_hit = 0;  // sessions opened on a problem that has finished responses
  std::uint64_t lookups_miss = 0;
  std::uint64_t twins_hit = 0;  // sessions opened with a seed that has a twin
  std::uint64_t twins_miss = 0;
  std::uint64_t drafts_hit = 0;  // drafts with at least one token
  std::uint64_t drafts_empty = 0;
  std::uint64_t draft_tokens = 0;
  std::uint64_t accepted_tokens = 0;
  std::uint64_t generated_tokens = 0;
  std::uint64_t undrafted_tokens = 0;  // of these, those for whose step no draft was asked: one step each
  std::uint64_t evicted_by_memory = 0;
  std::uint64_t evicted_by_epochs = 0;
  std::uint64_t evicted_by_responses = 0;
  std::uint64_t problems = 0;
  std::uint64_t sessions = 0;
  std::uint64_t history_responses = 0;
  std::uint64_t history_tokens = 0;
  std::int64_t newest_epoch = 0;
  std::uint64_t bytes = 0;  // of the memory budget
  std::array<SourceStats, kSourceNames.size()> sources;
  std::array<SourceStats, kAgeNames.size()> ages;

  // Responses that left the index, for any reason.
  std::uint64_t evicted() const { return evicted_by_memory + evicted_by_epochs + evicted_by_responses; }
  // Adds the counters of `other`; leaves the numbers of what is held.
  void add_counted(const NamespaceStats& other);
};

// A counter of a namespace, and how servers show it: as a family with the label `namespace`, and a second label if the
// family has several counters. Counters of one family stand next to each other.
struct Described {
  const char* name;
  std::uint64_t NamespaceStats::* number;
  const char* family;
  const char* label;  // empty: `namespace` alone
  const char* value;
  const char* help;
};

// The counters that only grow while the namespace exists, besides `sources` and `ages`.
inline constexpr Described kCounted[] = {
    {"lookups_hit", &NamespaceStats::lookups_hit, "problem_lookups", "result", "hit",
     "Sessions opened, by whether their problem had history."},
    {"lookups_miss", &NamespaceStats::lookups_miss, "problem_lookups", "result", "miss",
     "Sessions opened, by whether their problem had history."},
    {"twins_hit", &NamespaceStats::twins_hit, "twin_lookups", "result", "hit",
     "Sessions opened with a seed, by whether the latest response drawn with it was there."},
    {"twins_miss", &NamespaceStats::twins_miss, "twin_lookups", "result", "miss",
     "Sessions opened with a seed, by whether the latest response drawn with it was there."},
    {"drafts_hit", &NamespaceStats::drafts_hit, "drafts", "result", "hit",
     "Drafts that workers asked for, by whether the draft had tokens."},
    {"drafts_empty", &NamespaceStats::drafts_empty, "drafts", "result", "empty",
     "Drafts that workers asked for, by whether the draft had tokens."},
    {"draft_tokens", &NamespaceStats::draft_tokens, "draft_tokens", "", "",
     "Drafted tokens. Of a worker that reports which drafts it verified, the verified ones."},
    {"accepted_tokens", &NamespaceStats::accepted_tokens, "accepted_tokens", "", "",
     "Drafted tokens that the sessions then generated."},
    {"generated_tokens", &NamespaceStats::generated_tokens, "generated_tokens", "", "",
     "Tokens that the sessions generated."},
    {"undrafted_tokens", &NamespaceStats::undrafted_tokens, "undrafted_tokens", "", "",
     "Generated tokens of steps for which the worker asked for no draft, one token per step."},
    {"evicted_by_memory", &NamespaceStats::evicted_by_memory, "evicted_responses", "reason", "memory",
     "Responses that the index evicted, by the limit that it enforced: memory, or the window of epochs or responses."},
    {"evicted_by_epochs", &NamespaceStats::evicted_by_epochs, "evicted_responses", "reason", "epochs",
     "Responses that the index evicted, by the limit that it enforced: memory, or the window of epochs or responses."},
    {"evicted_by_responses", &NamespaceStats::evicted_by_responses, "evicted_responses", "reason", "responses",
     "Responses that the index evicted, by the limit that it enforced: memory, or the window of epochs or responses."},
};

using NamedNumber = std::pair<const char*, std::uint64_t NamespaceStats::*>;

// The numbers of what is held, which rise and fall, besides `newest_epoch`.
inline constexpr NamedNumber kHeld[] = {
    {"problems", &NamespaceStats::problems},
    {"sessions", &NamespaceStats::sessions},
    {"history_responses", &NamespaceStats::history_responses},
    {"history_tokens", &NamespaceStats::history_tokens},
    {"bytes", &NamespaceStats::bytes},
};

inline void NamespaceStats::add_counted(const NamespaceStats& other) {
  const auto add = [](auto& mine, const auto& others) {
    for (std::size_t i = 0; i < mine.size(); ++i) {
      mine[i].draft_tokens += others[i].draft_tokens;
      mine[i].accepted_tokens += others[i].accepted_tokens;
    }
  };
  for (const Described& counter : kCounted) this->*counter.number += other.*counter.number;
  add(sources, other.sources);
  add(ages, other.ages);
}

struct Counters {
  std::vector<std::pair<std::string, NamespaceStats>> namespaces;  // in no order
  NamespaceStats dropped;                                          // sums over the namespaces that are gone
};

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
};

// What became of a session in a step.
enum class Outcome : std::uint8_t { kStepped, kUnknown, kTooLong };

struct StepResult {
  std::vector<Token> tokens;
  std::vector<std::int64_t> offsets;  // B + 1
  std::vector<float> probabilities;   // one per token: of being accepted, given that all before it were
  std::vector<Outcome> outcomes;      // B if most_tokens was given, else empty
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

// Where ingested responses come from. Responses from a store come oldest first and are older than every response of the
// problem in the index. The engine puts them before those, keeps the twins of their epoch, and replaces no lengths and
// no text in the namespace index by theirs.
enum class Arrival : std::uint8_t {
  kNew,
  kStored,  // read because a session uses the problem
  kAhead,   // read before any session does, the most wanted problem first: a new one is the first to be evicted
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
  // twin: the newest response of the problem with the same seed and a prompt of the same length. Throws
  // std::invalid_argument.
  SessionId open(const std::string& name, Tokens prompt, const std::string& id = {}, Tokens generated = {},
                 std::optional<std::int64_t> seed = {});

  // Appends what each session generated, learns from it, and drafts. If `positions` says that a session has some of the
  // tokens already, it appends the rest. Throws UnknownSession or std::invalid_argument and changes nothing. Overwrites
  // `result`, and reuses its memory.
  void step(const StepRequest& request, StepResult& result);

  // Ends a session. With `commit` its generated tokens join the history of its problem at once, with the given epoch or
  // else the newest of the namespace, and with their alternatives (index/alternatives.h). Throws UnknownSession, or
  // std::invalid_argument if the alternatives do not fit the tokens, and changes nothing.
  void close(SessionId session, bool commit = true, std::optional<std::int64_t> epoch = {},
             std::span<const std::uint8_t> alternatives = {});

  // How many tokens each session has generated; -1 for a session that is not open.
  std::vector<std::int64_t> lengths(std::span<const SessionId> sessions) const;
  // How many tokens of the session's prompt identify its problem: all of them, or fewer in a later turn. Throws
  // UnknownSession.
  std::size_t prompt_length(SessionId session) const;
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
  // 0 for an unknown namespace.
  std::int64_t newest_epoch(const std::string& name) const;

  // What the namespace's estimator has learned, for restore_estimator(); empty if it has learned nothing yet.
  std::string estimator(const std::string& name) const;
  // Throws std::invalid_argument and changes nothing if `state` is not such a state.
  void restore_estimator(const std::string& name, std::string_view state);

  // Forgets the history of the namespace; its sessions go on. Returns how many responses it forgot. With `keep_learned`
  // the namespace keeps its counters and what its estimator has learned.
  std::uint64_t drop_namespace(const std::string& name, bool keep_learned = false);

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
  // The part of memory_bytes() that cannot be evicted: live text and sessions.
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
