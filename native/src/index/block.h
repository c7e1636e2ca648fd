// One block of memory for all arrays of a segment, and how the arrays lie in it.
//
// Large blocks are mapped from the operating system and unmapped at once. Evicted segments thereby leave no holes in
// the heap, and the memory budget holds for the process and not only for the ledger.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace histospec {

class Block {
 public:
  Block() = default;
  // Zeroed. Throws std::bad_alloc.
  explicit Block(std::size_t bytes);
  ~Block();
  Block(Block&& other) noexcept;
  Block& operator=(Block&& other) noexcept;

  std::byte* data() { return data_; }
  // Its memory, with padding and overhead.
  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  bool mapped_ = false;
};

// Lays out arrays one after another. Run it once with a null base to learn the size, then again with the memory.
class Layout {
 public:
  explicit Layout(std::byte* base) : base_(base) {}

  std::byte* take(std::size_t bytes) {
    constexpr std::size_t kAlign = 8;
    std::byte* const at = base_ ? base_ + size_ : nullptr;
    size_ += (bytes + kAlign - 1) / kAlign * kAlign;
    return at;
  }
  template <typename T>
  std::span<T> take_array(std::size_t n) {
    return {reinterpret_cast<T*>(take(n * sizeof(T))), n};
  }
  std::size_t size() const { return size_; }

 private:
  std::byte* base_;
  std::size_t size_ = 0;
};

// An array of unsigned numbers in memory of its owner: two bytes each if they fit, else four.
class Words {
 public:
  Words() = default;
  Words(Layout& layout, std::size_t size, std::size_t largest)
      : size_(size), wide_(largest > UINT16_MAX), data_(layout.take(size * (wide_ ? 4 : 2))) {}

  std::uint32_t operator[](std::size_t i) const { return wide_ ? wide()[i] : narrow()[i]; }
  void set(std::size_t i, std::uint32_t value) {
    if (wide_) {
      reinterpret_cast<std::uint32_t*>(data_)[i] = value;
    } else {
      reinterpret_cast<std::uint16_t*>(data_)[i] = static_cast<std::uint16_t>(value);
    }
  }

  // The first index in [first, last) whose number is at least `value`; the numbers there are sorted.
  std::uint32_t lower_bound(std::uint32_t first, std::uint32_t last, std::uint32_t value) const {
    return wide_ ? lower_bound(wide(), first, last, value) : lower_bound(narrow(), first, last, value);
  }

  std::size_t size() const { return size_; }

 private:
  const std::uint16_t* narrow() const { return reinterpret_cast<const std::uint16_t*>(data_); }
  const std::uint32_t* wide() const { return reinterpret_cast<const std::uint32_t*>(data_); }

  template <typename Word>
  static std::uint32_t lower_bound(const Word* words, std::uint32_t first, std::uint32_t last, std::uint32_t value) {
    std::uint32_t n = last - first;
    if (n == 0) return first;
    while (n > 1) {  // without a branch on the data
      const std::uint32_t half = n / 2;
      first += words[first + half - 1] < value ? half : 0;
      n -= half;
    }
    return first + (words[first] < value);
  }

  std::size_t size_ = 0;
  bool wide_ = false;
  std::byte* data_ = nullptr;
};

}  // namespace histospec
