// An array of small unsigned numbers, two bytes each where they fit and four where they do not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace histospec {

class Words {
 public:
  Words() = default;
  Words(std::size_t size, std::size_t largest)
      : size_(size), wide_(largest > UINT16_MAX), data_(new std::byte[size * width()]) {}

  std::uint32_t operator[](std::size_t i) const { return wide_ ? wide()[i] : narrow()[i]; }
  void set(std::size_t i, std::uint32_t value) {
    if (wide_) {
      reinterpret_cast<std::uint32_t*>(data_.get())[i] = value;
    } else {
      reinterpret_cast<std::uint16_t*>(data_.get())[i] = static_cast<std::uint16_t>(value);
    }
  }

  // How often `value` stands in [first, last). A plain loop over one width, which compilers vectorise.
  std::uint32_t count(std::size_t first, std::size_t last, std::uint32_t value) const {
    return wide_ ? count(wide(), first, last, value) : count(narrow(), first, last, static_cast<std::uint16_t>(value));
  }

  // The first index in [first, last) whose number is not below `value`; the numbers there are sorted.
  std::uint32_t lower_bound(std::uint32_t first, std::uint32_t last, std::uint32_t value) const {
    return wide_ ? lower_bound(wide(), first, last, value) : lower_bound(narrow(), first, last, value);
  }

  std::size_t size() const { return size_; }
  std::size_t bytes() const { return size_ * width(); }

 private:
  std::size_t width() const { return wide_ ? 4 : 2; }
  const std::uint16_t* narrow() const { return reinterpret_cast<const std::uint16_t*>(data_.get()); }
  const std::uint32_t* wide() const { return reinterpret_cast<const std::uint32_t*>(data_.get()); }

  template <typename Word>
  static std::uint32_t count(const Word* words, std::size_t first, std::size_t last, Word value) {
    std::uint32_t n = 0;
    for (std::size_t i = first; i < last; ++i) n += words[i] == value;
    return n;
  }

  template <typename Word>
  static std::uint32_t lower_bound(const Word* words, std::uint32_t first, std::uint32_t last, std::uint32_t value) {
    while (first < last) {
      const std::uint32_t middle = first + (last - first) / 2;
      if (words[middle] < value) {
        first = middle + 1;
      } else {
        last = middle;
      }
    }
    return first;
  }

  std::size_t size_ = 0;
  bool wide_ = false;
  std::unique_ptr<std::byte[]> data_;
};

}  // namespace histospec
