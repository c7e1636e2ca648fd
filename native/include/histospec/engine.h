// The engine of one shard: history, live text and drafts of all its namespaces.
//
// Threads. Every method may be called from any thread. One mutex guards the maps, the sessions and the live text; it is
// taken in the order in which the calls come. A step holds it for the whole batch: 256 sessions, or 16,384 new tokens,
// take a few milliseconds, and callers who share an engine send no more at once. All else holds it for a few
// milliseconds at most, however much there is to do, and lets others in between (lock_times() tells). Segments are
// immutable and are built outside of it: by the caller of ingest(), and by one builder thread for responses that were
// committed by sessions. A step therefore never waits for an index to be built.
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

// The longest draft that may be asked for.
inline constexpr int kMaxDraft = 1024;

// The session is not open: closed, never opened, or of an earlier process.
class UnknownSession : public std::out_of_range {
 public:
  using std::out_of_range::out_of_range;
};

struct EngineOptions {
  // What the index may hold; beyond it the least recently used problems go first, then the oldest segments of those in
  // use. Larger: more hits. Never below what the running sessions need.
  std::size_t memory_bytes = std::size_t{8} << 30;
  // The sliding window: how many of the newest epochs of a problem are kept.
  int history_epochs = 8;
  // How many threads draft for one batch. What they draft does not depend on it.
  int threads = 1;
  // How much text the index over all problems of a namespace holds, in tokens of about 15 bytes. 0: none. More helps
  // where problems share text (tool calls, code), and in the first epoch; each step looks it up, too.
  std::size_t namespace_tokens = std::size_t{1} << 19;
  // About how many of the newest responses of a problem are kept, whatever their epochs: segments that are older go as
  // a whole, single responses when they are merged.
  std::size_t history_responses = 4096;
};

// Upper bounds of the buckets in LockTimes, in seconds.
inline constexpr std::array<double, 9> kLockBounds = {0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1};

// For how long the engine's lock was held at a time, in seconds of CPU of the thread that held it: other threads' turns
// on a busy machine do not count. Not cumulative; the last bucket has no upper bound.
struct LockTimes {
  std::array<std::uint64_t, kLockBounds.size() + 1> counts{};
  double seconds = 0;  // all of them together
  double longest = 0;
};

// The source of a drafted token: that of its longest match, the twin, or the worker's own drafter.
inline constexpr std::array<const char*, 6> kSourceNames = {"history", "own", "siblings", "namespace", "twin", "model"};

// How many epochs older than the newest of its namespace the response is that a token of history came from.
inline constexpr std::array<const char*, 5> kAgeNames = {"0", "1", "2", "3", "4+"};

struct SourceStats {
  std::uint64_t draft_tokens = 0;
  std::uint64_t accepted_tokens = 0;
};

struct NamespaceStats {
  std::uint64_t lookups_hit = 0;  // sessions opened on a problem that has finished responses
  std::uint64_t lookups_miss = 0;
  std::uint64_t twins_hit = 0;  // sessions opened with a seed that has given a response of the problem lately
  std::uint64_t twins_miss = 0;
  std::uint64_t drafts_hit = 0;  // drafts with at least one token
  std::uint64_t drafts_empty = 0;
  std::uint64_t draft_tokens = 0;
  std::uint64_t accepted_tokens = 0;
  std::uint64_t generated_tokens = 0;
  std::uint64_t undrafted_tokens = 0;  // of these, beyond what a step with a draft gives: a step each
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

  // Responses that left the index, for whatever reason.
  std::uint64_t evicted() const { return evicted_by_memory + evicted_by_epochs + evicted_by_responses; }
  // Adds what `other` has counted; what is held stays as it is.
  void add_counted(const NamespaceStats& other);
};

// A number of a namespace, and how it is shown: as a family that has the label `namespace`, and another one where it
// has several numbers, which stand one after the other.
struct Described {
  const char* name;
  std::uint64_t NamespaceStats::* number;
  const char* family;
  const char* label;  // empty: none but `namespace`
  const char* value;
  const char* help;
};

// What only grows while the namespace is there, besides `sources` and `ages`.
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
     "Drafts asked for, by whether there was anything to draft."},
    {"drafts_empty", &NamespaceStats::drafts_empty, "drafts", "result", "empty",
     "Drafts asked for, by whether there was anything to draft."},
    {"draft_tokens", &NamespaceStats::draft_tokens, "draft_tokens", "", "",
     "Tokens drafted; of a worker that says which drafts it verified, those alone."},
    {"accepted_tokens", &NamespaceStats::accepted_tokens, "accepted_tokens", "", "",
     "Of these, the tokens that the sessions then generated."},
    {"generated_tokens", &NamespaceStats::generated_tokens, "generated_tokens", "", "",
     "Tokens that the sessions generated."},
    {"undrafted_tokens", &NamespaceStats::undrafted_tokens, "undrafted_tokens", "", "",
     "Steps for which no draft was asked, as one generated token each."},
    {"evicted_by_memory", &NamespaceStats::evicted_by_memory, "evicted_responses", "reason", "memory",
     "Responses gone from the index, by the limit that they were over: memory, or the window of epochs or responses."},
    {"evicted_by_epochs", &NamespaceStats::evicted_by_epochs, "evicted_responses", "reason", "epochs",
     "Responses gone from the index, by the limit that they were over: memory, or the window of epochs or responses."},
    {"evicted_by_responses", &NamespaceStats::evicted_by_responses, "evicted_responses", "reason", "responses",
     "Responses gone from the index, by the limit that they were over: memory, or the window of epochs or responses."},
};

using NamedNumber = std::pair<const char*, std::uint64_t NamespaceStats::*>;

// What comes and goes, besides `newest_epoch`.
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
  NamespaceStats dropped;                                          // what those had counted that are gone
};

// What a worker with a drafter of its own verified of each session: a prefix of the last draft from here, or tokens of
// its own drafter. Empty spans: the worker has no other drafter, and verified every draft in full.
struct VerifiedReport {
  std::span<const std::int32_t> verified;        // B: tokens of the session's last draft, at most kMaxDraft
  std::span<const std::int32_t> model_drafted;   // B, or empty: of the worker's drafter, since the last step
  std::span<const std::int32_t> model_accepted;  // B, or empty: of these
};

struct StepRequest {
  std::span<const SessionId> sessions;      // B, each at most once
  Tokens tokens;                            // T, flat
  std::span<const std::int64_t> offsets;    // B + 1, ascending from 0 to T
  std::span<const std::int64_t> positions;  // empty, or B: generated tokens before these
  int max_tokens = 16;                      // at most kMaxDraft
  float verify_cost = 0.05f;
  // Where it is given, sessions that cannot step are left out instead of an error: those that are not open, that have
  // fewer tokens than their position says, or that would have more than this. Then `positions` has to be given, too.
  std::optional<std::int64_t> most_tokens;
  VerifiedReport report = {};
};

// What became of a session in a step.
enum class Outcome : std::uint8_t { kStepped, kUnknown, kTooLong };

struct StepResult {
  std::vector<Token> tokens;
  std::vector<std::int64_t> offsets;  // B + 1
  std::vector<float> probabilities;   // one a token: of being accepted, given that all before it were
  std::vector<Outcome> outcomes;      // B where most_tokens was given, else none
};

struct LengthPrediction {
  std::vector<double> lengths;  // one a quantile
  std::size_t observations = 0;
};

// Other namespaces that have finished responses of the `asked` prompts of one, and of how many of them; in no order.
struct SharedPrompts {
  std::size_t asked = 0;
  std::vector<std::pair<std::string, std::size_t>> namespaces;
};

// Where ingested responses come from. Those of a store, oldest first, are older than whatever the index has of the
// problem. So they stand in front of it, replace no twin of their epoch, and leave the text that problems share, and
// the lengths, of newer responses alone.
enum class Arrival : std::uint8_t {
  kNew,
  kStored,  // read because the problem is in use
  kAhead,   // read ahead, from the most wanted problem on: one that is new to the index is the first to go
};

class Engine {
 public:
  explicit Engine(EngineOptions options = {});
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Adds finished responses to the history of the problem; they are in the index on return. `id` names the problem, or
  // is empty and the prompt does. One that has a seed becomes the twin of later sessions with that seed. Throws
  // std::invalid_argument and changes nothing if a token is negative, the prompt is empty, or a mask has another length
  // than its response.
  //
  void ingest(const std::string& name, Tokens prompt, std::span<const ResponseView> responses,
              const std::string& id = {}, Arrival arrival = Arrival::kNew);

  // Starts a session behind `prompt`; `generated` is what it generated before. Without an id, a prompt that is not
  // known may be a later turn of a problem: it begins with the prompt of the problem, and goes on as one of its
  // responses began. Then the session belongs to the problem with the longest such prompt, and so will its response.
  // The siblings of a session are the other open sessions of its problem. With the `seed` of coupled sampling, it
  // drafts first from its twin: the newest response of the problem that the same seed gave behind a prompt as long.
  // Throws std::invalid_argument.
  SessionId open(const std::string& name, Tokens prompt, const std::string& id = {}, Tokens generated = {},
                 std::optional<std::int64_t> seed = {});

  // Appends what each session generated, learns from it, and drafts. Where `positions` says that a session has some of
  // the tokens already, only the rest is appended. Throws UnknownSession or std::invalid_argument and changes nothing.
  // `result` is overwritten; one that is used again needs no new memory.
  void step(const StepRequest& request, StepResult& result);

  // Ends a session. With `commit` its generated tokens join the history of its problem at once, and in the epoch given,
  // else in the newest one of the namespace. Throws UnknownSession.
  void close(SessionId session, bool commit = true, std::optional<std::int64_t> epoch = {});

  // Generated tokens of each session; -1 where it is unknown.
  std::vector<std::int64_t> lengths(std::span<const SessionId> sessions) const;
  // How many tokens of the session's prompt name its problem: all of them, or, in a later turn, fewer. Throws
  // UnknownSession.
  std::size_t prompt_length(SessionId session) const;
  // Throws UnknownSession.
  std::vector<Token> generated(SessionId session) const;

  // The history of a problem as the index holds it, oldest segment first.
  std::vector<Response> history(const std::string& name, Tokens prompt, const std::string& id = {}) const;
  // Quantiles (linear between neighbours) of the lengths of the problem's responses that are longer than `generated`,
  // or, where it has none, of the namespace's latest ones. Empty if there are none either.
  LengthPrediction predict_length(const std::string& name, Tokens prompt, std::int64_t generated,
                                  std::span<const double> quantiles, const std::string& id = {}) const;
  // Whether the index holds finished responses of the problem.
  bool knows(const std::string& name, Tokens prompt, const std::string& id = {}) const;
  // Which other namespaces know the prompts of this one: of its `most` problems that came last those without an id,
  // token by token. Takes milliseconds: where there are thousands of namespaces, one that knows few of these prompts
  // may be missed, and where prompts are long, the last namespaces are not looked at.
  SharedPrompts shared_prompts(const std::string& name, std::size_t most = 64) const;
  // 0 where nothing is known.
  std::int64_t newest_epoch(const std::string& name) const;

  // What the namespace's estimator has learned, for restore_estimator() in another process; empty: nothing yet.
  std::string estimator(const std::string& name) const;
  // Throws std::invalid_argument and changes nothing if it is not such a state.
  void restore_estimator(const std::string& name, std::string_view state);

  // Forgets the history of the namespace; its sessions go on. Returns the number of responses forgotten. With
  // `keep_learned` the namespace stays, with its counters and what its estimator has learned.
  std::uint64_t drop_namespace(const std::string& name, bool keep_learned = false);

  // Whether committers should wait a moment: responses finish faster than they become segments, or memory is still
  // to be evicted. Without that, running sessions and what just finished could outgrow the budget.
  bool congested() const;
  // Whether the memory budget has ever cost a problem some of its history: then what was ingested may be gone.
  bool evicted() const;
  // Waits until committed responses have become segments, and what was left to the housekeeper is done.
  void wait_until_built();
  // What the index holds: segments, live text, sessions and their book-keeping.
  std::size_t memory_bytes() const;
  // What it may hold: `memory_bytes` of the options.
  std::size_t memory_budget() const;
  // The part of it that cannot be evicted: live text and sessions.
  std::size_t running_bytes() const;
  std::map<std::string, NamespaceStats> stats() const;
  LockTimes lock_times() const;
  // The same for servers with thousands of namespaces, and what dropped namespaces had counted: sums over all of
  // them never fall.
  Counters counters() const;
  // Re-derives the invariants of everything held; throws std::logic_error naming the first that fails.
  void check_integrity() const;

 private:
  class State;
  std::unique_ptr<State> state_;
};

}  // namespace histospec
