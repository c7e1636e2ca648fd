// What a caller chooses: the options of an engine, and how ingested responses arrive.
#pragma once

#include <cstddef>
#include <cstdint>

namespace histospec {

inline constexpr int kMaxThreads = 64;

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

// Where ingested responses come from. Responses from a store come oldest first and are older than every response of the
// problem in the index. The engine puts them before those, keeps the twins of their epoch, and replaces no lengths and
// no text in the namespace index by theirs.
enum class Arrival : std::uint8_t {
  kNew,
  kStored,  // read because a session uses the problem
  kAhead,   // read before any session does, the most wanted problem first: a new one is the first to be evicted
};

}  // namespace histospec
