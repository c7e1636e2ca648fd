// One piece of memory for all arrays of a segment.
//
// Large pieces come straight from the operating system and go straight back: evicted segments leave no holes in the
// heap, so that a memory budget holds for the process and not only for the books.
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
  // What it really takes.
  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  bool mapped_ = false;
};

// Lays arrays one after another: first to learn how much memory they need (base null), then into it.
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
