// The twins of a problem: what each seed gave last.
//
// With coupled sampling the noise of a token depends on the seed and on where it stands, alone. So a session says,
// wherever the policy has not moved, what its seed gave the last time: that response is its twin. Where they diverge,
// the noise is the same again behind the same text: there the twin is found again.
//
// A twin is one piece of text that never changes, 4 bytes a token: drafting from it is reading on. It is named by the
// seed and by the position at which it begins, which tells apart the turns of one trajectory. It ends where the first
// tool or user turn begins: behind that, a session is opened anew, and begins elsewhere.
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
  // The newest epochs of the problem that have twins here. A seed either comes again every epoch, or never: a twin that
  // was not replaced for a whole epoch will not be used again.
  static constexpr std::size_t kEpochs = 2;

  struct Key {
    std::int64_t seed;
    std::size_t start;  // tokens before it
    auto operator<=>(const Key&) const = default;
  };

  // The response as a twin; null if it has no seed, or does not begin with a generated token.
  static std::shared_ptr<const Twin> of(const ResponseView& response);

  // Takes the place of one of the same name and the same or an older epoch; a `stored` one, which is older than any of
  // its epoch, only of an older epoch. May throw std::bad_alloc; then it is not there.
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

  std::map<std::int64_t, Epoch> epochs_;  // a name stands in one of them only
  std::size_t held_bytes_ = 0;
};

}  // namespace histospec
