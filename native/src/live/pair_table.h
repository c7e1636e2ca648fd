// The newest link of every pair of neighbouring tokens: a hash table that grows page by page.
//
// Extendible hashing (R. Fagin et al., "Extendible hashing: a fast access method for dynamic files", 1979): the first
// bits of a hash choose a page in a directory, other bits a slot in the page. A full page is split in two. The
// directory doubles if it cannot tell the two apart. No insertion moves more than one page of slots, however many pairs
// there are. This matters because the table changes under the engine's lock.
//
// A lookup reads an entry of the directory, which is small, and one or two cache lines. A slot has 12 bytes; a quarter
// to a half of the slots are in use.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "hash/keyed.h"
#include "histospec/types.h"

namespace histospec {

class PairTable {
 public:
  // A number chosen by the owner of the table; kNone is no link.
  using ChainIndex = std::uint32_t;
  static constexpr ChainIndex kNone = 0;

  PairTable() = default;
  PairTable(const PairTable&) = delete;
  PairTable& operator=(const PairTable&) = delete;

  // The link of the pair; kNone if the table does not have the pair.
  ChainIndex find(Token a, Token b) const {
    if (directory_.empty()) return kNone;
    const std::uint64_t hash = hash_key.of(a, b);
    const Entry& entry = directory_[prefix(hash)];
    return entry.slots[slot_of(entry, hash, a, b)].index;
  }
  // A reference to the link of the pair, valid until the next call. For a new pair it is kNone, and the caller must
  // set another value. Throws std::bad_alloc and changes nothing.
  ChainIndex& operator()(Token a, Token b) {
    const std::uint64_t hash = hash_key.of(a, b);
    if (directory_.empty()) begin();
    while (true) {
      const Entry& entry = directory_[prefix(hash)];
      Slot& slot = entry.slots[slot_of(entry, hash, a, b)];
      if (slot.index != kNone) return slot.index;
      Page& page = pages_[entry.page];
      if (2 * (page.used + 1) <= entry.mask + 1) {
        slot.a = a, slot.b = b, ++page.used, ++used_;
        return slot.index;
      }
      grow(entry.page, prefix(hash));
    }
  }
  // Removes a pair that the table has. Never allocates.
  void erase(Token a, Token b) {
    const std::uint64_t hash = hash_key.of(a, b);
    const Entry& entry = directory_[prefix(hash)];
    std::size_t hole = slot_of(entry, hash, a, b);
    // Entries that follow move up unless they begin behind the hole (D. Knuth, TAOCP 3, 6.4, algorithm R).
    for (std::size_t i = (hole + 1) & entry.mask; entry.slots[i].index != kNone; i = (i + 1) & entry.mask) {
      const std::size_t home = first_slot(hash_key.of(entry.slots[i].a, entry.slots[i].b), entry.mask);
      if (((i - home) & entry.mask) < ((i - hole) & entry.mask)) continue;
      entry.slots[hole] = entry.slots[i];
      hole = i;
    }
    entry.slots[hole] = Slot();
    --pages_[entry.page].used;
    --used_;
  }

  // How many slots a lookup of the pair reads.
  std::size_t probes(Token a, Token b) const {
    const std::uint64_t hash = hash_key.of(a, b);
    const Entry& entry = directory_[prefix(hash)];
    return ((slot_of(entry, hash, a, b) - first_slot(hash, entry.mask)) & entry.mask) + 1;
  }

  std::size_t size() const { return used_; }
  std::size_t bytes() const {
    return slots_ * sizeof(Slot) + pages_.capacity() * sizeof(Page) + directory_.capacity() * sizeof(Entry);
  }

 private:
  struct Slot {
    Token a = 0;
    Token b = 0;
    ChainIndex index = kNone;
  };
  struct Page {
    std::unique_ptr<Slot[]> slots;
    std::uint32_t used = 0;
    int depth = 0;  // how many bits the hashes of its pairs have in common
  };
  struct Entry {
    Slot* slots;
    std::uint32_t mask;
    std::uint32_t page;
  };

  static constexpr std::uint32_t kFirstPage = 64;
  // A page of this many slots (48 KiB) is split instead of doubled.
  static constexpr std::uint32_t kLargestPage = 4096;
  // The directory has at most one entry per this many pairs. If many hashes begin alike, pages grow instead.
  static constexpr std::size_t kPairsAnEntry = 256;

  // Uses bits that the directory does not use.
  static std::size_t first_slot(std::uint64_t hash, std::uint32_t mask) { return (hash >> 40) & mask; }
  static std::size_t slot_of(const Entry& entry, std::uint64_t hash, Token a, Token b) {
    std::size_t i = first_slot(hash, entry.mask);
    while (entry.slots[i].index != kNone && (entry.slots[i].a != a || entry.slots[i].b != b)) i = (i + 1) & entry.mask;
    return i;
  }
  std::size_t prefix(std::uint64_t hash) const { return hash >> 1 >> (63 - depth_); }

  void begin() {
    pages_.reserve(1);
    directory_.reserve(1);
    auto slots = std::make_unique<Slot[]>(kFirstPage);
    directory_.push_back({slots.get(), kFirstPage - 1, 0});
    pages_.push_back({std::move(slots), 0, 0});
    slots_ = kFirstPage;
  }

  // Makes room in the page of the directory's entry `at`.
  void grow(std::uint32_t page, std::size_t at) {
    const std::uint32_t size = directory_[at].mask + 1;
    const bool splits = size >= kLargestPage && (pages_[page].depth < depth_ || 2 * directory_.size() * kPairsAnEntry <=
                                                                                    std::max<std::size_t>(used_, 1));
    if (!splits) {
      move(page, at, 2 * size, {});
      return;
    }
    pages_.reserve(pages_.size() < pages_.capacity() ? 0 : 2 * pages_.capacity());
    auto upper = std::make_unique<Slot[]>(size);
    if (pages_[page].depth == depth_) {
      std::vector<Entry> doubled(2 * directory_.size());
      for (std::size_t i = 0; i < doubled.size(); ++i) doubled[i] = directory_[i / 2];
      directory_.swap(doubled);
      ++depth_;
      at *= 2;
    }
    move(page, at, size, std::move(upper));
  }

  // Moves a page into new slots. If `upper` is given, the pairs whose next bit is set go there, as a page of their own.
  void move(std::uint32_t page, std::size_t at, std::uint32_t size, std::unique_ptr<Slot[]> upper) {
    auto lower = std::make_unique<Slot[]>(size);
    const std::unique_ptr<Slot[]> old = std::move(pages_[page].slots);
    const std::uint32_t old_size = directory_[at].mask + 1;
    const int depth = pages_[page].depth;
    const std::size_t entries = std::size_t{1} << (depth_ - depth), first = at / entries * entries;
    Entry low = {lower.get(), size - 1, page},
          high = {upper.get(), size - 1, static_cast<std::uint32_t>(pages_.size())};
    std::uint32_t high_used = 0;
    for (std::uint32_t i = 0; i < old_size; ++i) {
      if (old[i].index == kNone) continue;
      const std::uint64_t hash = hash_key.of(old[i].a, old[i].b);
      const bool goes_up = upper && (hash >> (63 - depth) & 1);
      const Entry& target = goes_up ? high : low;
      target.slots[slot_of(target, hash, old[i].a, old[i].b)] = old[i];
      high_used += goes_up;
    }
    const std::size_t half = upper ? entries / 2 : entries;
    std::fill_n(directory_.begin() + static_cast<std::ptrdiff_t>(first), half, low);
    std::fill_n(directory_.begin() + static_cast<std::ptrdiff_t>(first + half), entries - half, high);
    slots_ += (upper ? 2 * size : size) - old_size;
    pages_[page].slots = std::move(lower);
    pages_[page].used -= high_used;
    if (!upper) return;
    pages_[page].depth = depth + 1;
    pages_.push_back({std::move(upper), high_used, depth + 1});  // there is room
  }

  std::vector<Page> pages_;
  std::vector<Entry> directory_;
  int depth_ = 0;  // how many bits of a hash the directory uses
  std::size_t slots_ = 0;
  std::size_t used_ = 0;
};

}  // namespace histospec
