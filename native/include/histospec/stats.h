// What an engine counts, and how servers show it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace histospec {

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
  std::uint64_t misnamed_lookups = 0;  // of these, sessions whose prompt has responses under another problem id
  std::uint64_t twins_hit = 0;         // sessions opened with a seed that has a twin
  std::uint64_t twins_miss = 0;
  std::uint64_t drafts_hit = 0;  // drafts with at least one token
  std::uint64_t drafts_empty = 0;
  std::uint64_t draft_tokens = 0;
  std::uint64_t accepted_tokens = 0;
  std::uint64_t generated_tokens = 0;
  std::uint64_t undrafted_tokens = 0;  // of these, those for whose step no draft was asked: one step each
  // What verifying the draft tokens of all drafters cost, in millionths of a step without drafts: of each step at the
  // verify cost that its request had.
  std::uint64_t verify_microsteps = 0;
  std::uint64_t evicted_by_memory = 0;
  std::uint64_t evicted_by_epochs = 0;
  std::uint64_t evicted_by_responses = 0;
  std::uint64_t index_failures = 0;
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
    {"misnamed_lookups", &NamespaceStats::misnamed_lookups, "misnamed_lookups", "", "",
     "Sessions opened on a problem without history whose prompt has history under another problem id, or without one."},
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
    {"verify_microsteps", &NamespaceStats::verify_microsteps, "verify_microsteps", "", "",
     "Cost of verifying draft tokens of all drafters, each step at its verify cost, in millionths of a step without "
     "drafts."},
    {"evicted_by_memory", &NamespaceStats::evicted_by_memory, "evicted_responses", "reason", "memory",
     "Responses that the index evicted, by the limit that it enforced: memory, or the window of epochs or responses."},
    {"evicted_by_epochs", &NamespaceStats::evicted_by_epochs, "evicted_responses", "reason", "epochs",
     "Responses that the index evicted, by the limit that it enforced: memory, or the window of epochs or responses."},
    {"evicted_by_responses", &NamespaceStats::evicted_by_responses, "evicted_responses", "reason", "responses",
     "Responses that the index evicted, by the limit that it enforced: memory, or the window of epochs or responses."},
    {"index_failures", &NamespaceStats::index_failures, "index_failures", "", "",
     "Times that responses could not be indexed: memory ran out, or they are too long for a segment."},
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

}  // namespace histospec
