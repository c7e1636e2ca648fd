// The newest place of every pair of neighbouring tokens: a hash table with open addressing, one line of memory a
// look-up. Only reserve() and keep() allocate; they throw std::bad_alloc and have changed nothing then.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "histospec/types.h"

namespace histospec {

class PairTable {
 public:
  struct Place {
    std::uint32_t text = kNoText;
    std::uint32_t end = 0;  // one past the pair; the token at `end` is what came next
  };
  static constexpr std::uint32_t kNoText = UINT32_MAX;

  // Makes room for so many pairs more.
  void reserve(std::size_t more) {
    if (2 * (used_ + more) <= slots_.size()) return;
    std::size_t size = std::max<std::size_t>(slots_.size(), 64);
    while (size < 2 * (used_ + more)) size *= 2;
    rebuild(size, [](const Place&) { return true; });
  }
  // The place of the pair, to be set; kNoText where it is new. There must be room.
  Place& operator()(Token a, Token b) {
    Slot& slot = slots_[index(a, b)];
    if (slot.place.text == kNoText) slot.a = a, slot.b = b, ++used_;
    return slot.place;
  }
  Place find(Token a, Token b) const { return slots_.empty() ? Place() : slots_[index(a, b)].place; }

  // Lets `change` see every place, and forgets the pairs for which it leaves none.
  template <typename Change>
  void keep(Change change) {
    rebuild(slots_.size(), [&](Place& place) { return change(place), place.text != kNoText; });
  }

  std::size_t size() const { return used_; }
  std::size_t bytes() const { return slots_.capacity() * sizeof(Slot); }

 private:
  struct Slot {
    Token a;
    Token b;
    Place place;
  };

  std::size_t index(Token a, Token b) const {
    const std::uint64_t key =
        static_cast<std::uint64_t>(static_cast<std::uint32_t>(a)) << 32 | static_cast<std::uint32_t>(b);
    const std::size_t mask = slots_.size() - 1;
    std::size_t i = (key * 0x9e3779b97f4a7c15ull) >> 32 & mask;
    while (slots_[i].place.text != kNoText && (slots_[i].a != a || slots_[i].b != b)) i = (i + 1) & mask;
    return i;
  }

  template <typename Keep>
  void rebuild(std::size_t size, Keep keep) {
    std::vector<Slot> old(size);
    old.swap(slots_);
    used_ = 0;
    for (Slot& slot : old) {
      if (slot.place.text != kNoText && keep(slot.place)) (*this)(slot.a, slot.b) = slot.place;
    }
  }

  std::vector<Slot> slots_;
  std::size_t used_ = 0;
};

}  // namespace histospec
