#include "index/block.h"

#include <sys/mman.h>

#include <cstring>
#include <new>
#include <utility>

namespace histospec {
namespace {

constexpr std::size_t kMapped = 64 << 10;  // blocks of this size and more are mapped
constexpr std::size_t kPage = 4096;
constexpr std::size_t kHeader = 16;  // overhead of malloc

}  // namespace

Block::Block(std::size_t bytes) {
  if (bytes >= kMapped) {
    bytes_ = (bytes + kPage - 1) / kPage * kPage;
    void* const mapped = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped != MAP_FAILED) {
      data_ = static_cast<std::byte*>(mapped);
      mapped_ = true;
      return;
    }
    // The operating system limits the number of mappings; use the heap instead.
  }
  data_ = static_cast<std::byte*>(::operator new(bytes));
  std::memset(data_, 0, bytes);
  bytes_ = bytes + kHeader;
}

Block::~Block() {
  if (mapped_) {
    munmap(data_, bytes_);
  } else {
    ::operator delete(data_);
  }
}

Block::Block(Block&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      mapped_(std::exchange(other.mapped_, false)) {}

Block& Block::operator=(Block&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(mapped_, other.mapped_);
  return *this;
}

}  // namespace histospec
