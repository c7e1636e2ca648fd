// How often each pair of neighbouring tokens occurs in a text: a hash table with linear probing.
//
// A slot holds 32 bits of the pair's hash instead of the pair, so that a text takes little of the CPU cache. Pairs with
// equal bits are counted together: about 100 of a million pairs. Then the noise of these places is not the sampler's,
// and a draft may be wrong there.
#pragma once

#include <cstdint>
#include <vector>

#include "histospec/types.h"

namespace histospec {

class PairCounts {
 public:
  std::uint32_t of(Token a, Token b) const { return slots_.empty() ? 0 : slots_[slot_of(hash_of(a, b))].count; }
  // Fetches what of() and add() read into the CPU cache.
  void prefetch(Token a, Token b) const {
    if (!slots_.empty()) __builtin_prefetch(&slots_[hash_of(a, b) & (slots_.size() - 1)]);
  }
  // May throw std::bad_alloc; then the pair is not counted.
  void add(Token a, Token b) {
    if (2 * (used_ + 1) > slots_.size()) grow();
    Slot& slot = slots_[slot_of(hash_of(a, b))];
    used_ += slot.count == 0;
    slot.hash = hash_of(a, b);
    ++slot.count;
  }
  std::size_t bytes() const { return slots_.capacity() * sizeof(Slot); }

 private:
  struct Slot {
    std::uint32_t hash = 0;
    std::uint32_t count = 0;  // 0: the slot is free
  };
  static constexpr std::size_t kFirst = 256;

  static std::uint32_t hash_of(Token a, Token b) {
    const std::uint64_t key =
        static_cast<std::uint64_t>(static_cast<std::uint32_t>(a)) << 32 | static_cast<std::uint32_t>(b);
    return static_cast<std::uint32_t>((key * 0x9e3779b97f4a7c15ull) >> 32);
  }
  std::size_t slot_of(std::uint32_t hash) const {
    const std::size_t mask = slots_.size() - 1;
    std::size_t i = hash & mask;
    while (slots_[i].count != 0 && slots_[i].hash != hash) i = (i + 1) & mask;
    return i;
  }
  void grow() {
    PairCounts larger;
    larger.slots_.resize(slots_.empty() ? kFirst : 2 * slots_.size());
    for (const Slot& slot : slots_) {
      if (slot.count != 0) larger.slots_[larger.slot_of(slot.hash)] = slot;
    }
    slots_.swap(larger.slots_);
  }

  std::vector<Slot> slots_;
  std::size_t used_ = 0;
};

}  // namespace histospec
