// Replaces the program's operator new: counts what is held, and fails on demand. Include it in one file of a program.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace allocations {

inline std::atomic<std::size_t> bytes{0};
inline std::atomic<std::size_t> calls{0};
// Allocations of this thread until one fails; negative: none will.
inline thread_local long until_failure = -1;

// What operator new has given out and not got back.
inline std::size_t held() { return bytes.load(); }
// How often operator new gave something out, in all threads.
inline std::size_t made() { return calls.load(); }

// While it lives, the n-th allocation of this thread (from 0) throws std::bad_alloc.
class Failure {
 public:
  explicit Failure(long n) { until_failure = n; }
  ~Failure() { until_failure = -1; }
  Failure(const Failure&) = delete;
  Failure& operator=(const Failure&) = delete;
  // It was reached.
  bool happened() const { return until_failure == -2; }
};

constexpr std::size_t kHeader = alignof(std::max_align_t);

inline void* allocate(std::size_t size) {
  if (until_failure == 0) {
    until_failure = -2;
    throw std::bad_alloc();
  }
  if (until_failure > 0) --until_failure;
  auto* block = static_cast<std::byte*>(std::malloc(size + kHeader));
  if (!block) throw std::bad_alloc();
  *reinterpret_cast<std::size_t*>(block) = size;
  bytes += size;
  ++calls;
  return block + kHeader;
}

inline void release(void* pointer) noexcept {
  if (!pointer) return;
  auto* block = static_cast<std::byte*>(pointer) - kHeader;
  bytes -= *reinterpret_cast<std::size_t*>(block);
  std::free(block);
}

}  // namespace allocations

void* operator new(std::size_t size) { return allocations::allocate(size); }
void* operator new[](std::size_t size) { return allocations::allocate(size); }
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  try {
    return allocations::allocate(size);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void operator delete(void* pointer, const std::nothrow_t&) noexcept { allocations::release(pointer); }
void operator delete(void* pointer) noexcept { allocations::release(pointer); }
void operator delete[](void* pointer) noexcept { allocations::release(pointer); }
void operator delete(void* pointer, std::size_t) noexcept { allocations::release(pointer); }
void operator delete[](void* pointer, std::size_t) noexcept { allocations::release(pointer); }
