// A problem: its history, and the live text of the group that is running.
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

#include "draft/twins.h"
#include "index/segments.h"
#include "live/live_text.h"
#include "registry/monitor.h"

namespace histospec {

// What names a problem: an explicit id, or else the prompt itself. Compared token by token, never by hash alone.
struct ProblemKey {
  // Without an id, the prompt. Hashing a long one takes a while: it is done here, once, before anything is locked.
  ProblemKey(std::string its_id, Tokens its_prompt);

  // The hash of an empty prompt, and that of a prompt that goes on with a token.
  static std::uint64_t start() { return std::hash<std::string>()(std::string()); }
  static std::uint64_t next(std::uint64_t hash, Token token) {
    hash = (hash ^ static_cast<std::uint32_t>(token)) * 0x9E3779B97F4A7C15u;
    return hash ^ hash >> 29;
  }

  std::string id;
  std::vector<Token> prompt;  // empty when there is an id
  std::uint64_t hash;

  bool operator==(const ProblemKey&) const = default;
  // By hash: keys that differ mostly differ there.
  std::strong_ordering operator<=>(const ProblemKey& other) const {
    return std::tie(hash, id, prompt) <=> std::tie(other.hash, other.id, other.prompt);
  }
};

struct Namespace;

// What something holds, as the ledger counts it.
struct Holding {
  std::uint64_t bytes = 0, problems = 0, sessions = 0, responses = 0, tokens = 0;

  bool operator==(const Holding&) const = default;
  Holding& operator+=(const Holding& other);
  Holding& operator-=(const Holding& other);
};

struct Problem : std::enable_shared_from_this<Problem> {
  // What it holds, in parts that change by themselves: the problem itself, and what it has of these.
  enum Part : std::uint8_t { kItself, kSegments, kLive, kTwins };
  static constexpr std::array<Part, 4> all_parts = {kItself, kSegments, kLive, kTwins};
  static constexpr std::size_t kParts = all_parts.size();

  explicit Problem(ProblemKey its_key) : key(std::move(its_key)) {}

  const ProblemKey key;
  Namespace* owner = nullptr;
  // Swapped as a whole, never changed: who reads outside of the lock keeps the snapshot.
  std::shared_ptr<const Segments> segments GUARDED_BY(engine_lock) = std::make_shared<const Segments>();
  // While sessions run, or finished responses wait for their segment.
  std::unique_ptr<LiveText> live GUARDED_BY(engine_lock);
  std::unique_ptr<Twins> twins GUARDED_BY(engine_lock);  // of responses that have a seed
  bool building GUARDED_BY(engine_lock) = false;         // a segment of its finished responses is on its way
  bool untidy GUARDED_BY(engine_lock) = false;           // the housekeeper will tidy its live text
  // Grows when the history is forgotten: what was on its way is then discarded.
  std::uint64_t generation GUARDED_BY(engine_lock) = 0;

  // The registry's: its places among all problems, those of its namespace, and, while it has some, those with twins.
  std::list<Problem*>::iterator recency GUARDED_BY(engine_lock);
  std::list<Problem*>::iterator member GUARDED_BY(engine_lock);
  std::list<Problem*>::iterator twinned GUARDED_BY(engine_lock);
  std::uint64_t dropped GUARDED_BY(engine_lock) = 0;  // the last drop of its namespace that it has seen

  // Whether the index of the namespace should see one of these `responses` that came: of each group it sees one,
  // however many calls the group comes in.
  bool shares(std::int64_t epoch, std::size_t responses) REQUIRES(engine_lock);

  // Whether a response of this problem began as `prompt` goes on behind this problem's prompt.
  bool continued_by(Tokens prompt) const REQUIRES(engine_lock);
  // The newest response that is named so; null if there is none.
  std::shared_ptr<const Twin> twin(Twins::Key name) const REQUIRES(engine_lock) {
    return twins ? twins->find(name) : nullptr;
  }
  bool known() const REQUIRES(engine_lock) { return !segments->empty() || (live && live->finished_tokens() > 0); }
  Holding holding(Part part) const REQUIRES(engine_lock);

 private:
  std::optional<std::int64_t> shared_epoch_ GUARDED_BY(engine_lock);  // of the last one that it saw
  std::size_t not_shared_ GUARDED_BY(engine_lock) = 0;                // responses that came since
};

// The problems of a namespace, found by their keys. A tree, because a hash table moves all of them at once when it
// grows, under the engine's lock.
struct ByKey {
  using is_transparent = void;
  static const ProblemKey& key(const ProblemKey& of) { return of; }
  static const ProblemKey& key(const std::shared_ptr<Problem>& of) { return of->key; }
  bool operator()(const auto& a, const auto& b) const { return key(a) < key(b); }
};
using Problems = std::set<std::shared_ptr<Problem>, ByKey>;

}  // namespace histospec
