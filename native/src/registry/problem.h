// A problem: its history, the live text of its running group, and its sessions.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "draft/drafter.h"
#include "draft/twins.h"
#include "hash/keyed.h"
#include "index/segments.h"
#include "live/live_text.h"
#include "registry/monitor.h"
#include "registry/tenant.h"

namespace histospec {

// Identifies a problem: by an explicit id, or else by its prompt. Compared token by token, never by hash alone.
struct ProblemKey {
  // Keeps the prompt if there is no id. Hashes it here, once and without the lock, because a long prompt takes a while.
  ProblemKey(std::string its_id, Tokens its_prompt);

  std::string id;
  std::vector<Token> prompt;  // empty if there is an id
  std::uint64_t hash;         // of the id or the prompt
  std::uint64_t prompt_hash;  // even if there is an id; no part of the identity

  bool operator==(const ProblemKey& other) const { return (*this <=> other) == 0; }
  // Compares the hashes first, because different keys mostly differ there.
  std::strong_ordering operator<=>(const ProblemKey& other) const {
    return std::tie(hash, id, prompt) <=> std::tie(other.hash, other.id, other.prompt);
  }
};

struct Namespace;

// What a part holds, as the ledger counts it.
struct Holding {
  std::uint64_t bytes = 0, problems = 0, sessions = 0, responses = 0, tokens = 0;

  bool operator==(const Holding&) const = default;
  // Replaces one part by another.
  void change(const Holding& before, const Holding& after);
};

struct Problem : std::enable_shared_from_this<Problem> {
  // Its parts, which change independently: the problem itself, its segments, its live text and its twins.
  enum Part : std::uint8_t { kItself, kSegments, kLive, kTwins };
  static constexpr std::array<Part, 4> all_parts = {kItself, kSegments, kLive, kTwins};
  static constexpr std::size_t kParts = all_parts.size();

  explicit Problem(ProblemKey its_key) : key(std::move(its_key)) {}

  const ProblemKey key;
  Namespace* owner = nullptr;
  // Replaced as a whole, never changed, so that a thread can read a snapshot without the lock.
  std::shared_ptr<const Segments> segments GUARDED_BY(engine_lock) = std::make_shared<const Segments>();
  // Exists while sessions run, or finished responses wait for their segment.
  std::unique_ptr<LiveText> live GUARDED_BY(engine_lock);
  std::unique_ptr<Twins> twins GUARDED_BY(engine_lock);  // of responses with a seed
  bool building GUARDED_BY(engine_lock) = false;  // whether the builder has it in its queue or builds its segment
  bool untidy GUARDED_BY(engine_lock) = false;    // whether the housekeeper will tidy its live text
  // Grows when the history is forgotten, so that segments built from it meanwhile are discarded.
  std::uint64_t generation GUARDED_BY(engine_lock) = 0;

  // Fields of the registry: its nodes in the lists of its shelf, of the problems of its namespace, and of those with
  // twins.
  std::list<Problem*>::iterator on_shelf GUARDED_BY(engine_lock);
  std::list<Problem*>::iterator member GUARDED_BY(engine_lock);
  std::list<Problem*>::iterator twinned GUARDED_BY(engine_lock);
  Tenant::Shelf shelf GUARDED_BY(engine_lock) = Tenant::kRecent;
  std::uint64_t dropped GUARDED_BY(engine_lock) = 0;  // the last drop of its namespace that visited it

  // Whether the namespace index lacks a response of the group to which these new `responses` belong, however many calls
  // bring the group. The caller then adds one.
  bool shares(std::int64_t epoch, std::size_t responses) REQUIRES(engine_lock);

  // Whether `prompt` consists of this problem's prompt and the beginning of one of its responses.
  bool continued_by(Tokens prompt) const REQUIRES(engine_lock);
  // The twin with this key; null if there is none.
  std::shared_ptr<const Twin> twin(Twins::Key name) const REQUIRES(engine_lock) {
    return twins ? twins->find(name) : nullptr;
  }
  bool known() const REQUIRES(engine_lock) { return !segments->empty() || (live && live->finished_tokens() > 0); }
  Holding holding(Part part) const REQUIRES(engine_lock);

 private:
  std::optional<std::int64_t> shared_epoch_ GUARDED_BY(engine_lock);  // of the last response in the namespace index
  std::size_t not_shared_ GUARDED_BY(engine_lock) = 0;                // responses that came since
};

// The problems of a namespace by key. A tree, because a hash table that grows moves all of them at once, under the
// engine's lock.
struct ByKey {
  using is_transparent = void;
  static const ProblemKey& key(const ProblemKey& of) { return of; }
  static const ProblemKey& key(const std::shared_ptr<Problem>& of) { return of->key; }
  bool operator()(const auto& a, const auto& b) const { return key(a) < key(b); }
};
using Problems = std::set<std::shared_ptr<Problem>, ByKey>;

// A session: a response while a worker generates it. The thread that opens it makes it; from then on the engine's lock
// guards it.
struct Session {
  std::shared_ptr<Namespace> namespace_;
  std::shared_ptr<Problem> problem;
  LiveText::TextId text;
  bool asked = false;                      // whether the worker asked for a draft since the last new tokens
  std::optional<Twins::Key> name_of_twin;  // the key of its twin, and later of its own response
  std::weak_ptr<const Twin> twin;          // weak: eviction may free it at any time
  bool position_noise = false;             // whether the noise of its seed is that of vLLM's positions
  // Counts its text, if it has a seed and other noise. Without it, because memory ran out, the session drafts as one
  // without a seed.
  std::optional<NoiseCounter> noise;
  DraftContext context;
  Draft draft;             // the last draft, which the worker verifies now
  bool counted = true;     // whether its tokens are counted as drafted; else the next report says how many to count
  std::uint64_t step = 0;  // the number of its last step

  std::size_t noise_bytes() const { return noise ? noise->bytes() : 0; }
};

}  // namespace histospec
