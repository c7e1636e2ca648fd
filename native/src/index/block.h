// One block of memory for all arrays of a segment.
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

}  // namespace histospec
