// The twins of a problem: the last response that was drawn with each seed.
//
// With coupled sampling the noise of a token is a function of the seed, the two tokens before it, and the number of
// times that this pair occurred before. A session therefore repeats the last response of its seed wherever the policy
// has not changed. That response is its twin. After a difference, the noise is the same again behind the same tokens,
// so the session follows the twin from there (DraftContext::synchronise).
//
// A twin is one piece of text that never changes, 4 bytes per token; a draft is the text that follows in it. Its key is
// the seed and the position at which it begins, which tells the turns of one trajectory apart. It ends where the first
// tool or user turn begins, because the worker opens a new session behind that turn.
//
// Sessions hold weak references to their twins: eviction may free one at any time.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "histospec/types.h"

namespace histospec {

using Twin = std::vector<Token>;

class Twins {
 public:
  // How many of the newest epochs keep their twins. A seed either comes back in every epoch or never, so a twin that
  // was not replaced for a whole epoch will not be used again.
  static constexpr std::size_t kEpochs = 2;

  struct Key {
    std::int64_t seed;
    std::size_t start;  // tokens before the twin
    auto operator<=>(const Key&) const = default;
  };

  // The response as a twin; null if it has no seed or does not begin with a generated token.
  static std::shared_ptr<const Twin> of(const ResponseView& response);

  // Adds a twin. It replaces a twin with the same key of the same or an older epoch. A `stored` twin, which is older
  // than the others of its epoch, replaces only those of older epochs. May throw std::bad_alloc; then the twin is not
  // added.
  void add(Key key, std::int64_t epoch, std::shared_ptr<const Twin> twin, bool stored = false);
  // Null if there is none.
  std::shared_ptr<const Twin> find(Key key) const;

  std::size_t bytes() const { return sizeof(*this) + held_bytes_; }
  // Throws std::logic_error naming the invariant that fails.
  void check_integrity() const;

 private:
  using Epoch = std::map<Key, std::shared_ptr<const Twin>>;

  static std::size_t bytes_of(const Twin& twin);
  void forget(Epoch& epoch, Key key);

  std::map<std::int64_t, Epoch> epochs_;  // a key stands in one of them only
  std::size_t held_bytes_ = 0;
};

}  // namespace histospec
