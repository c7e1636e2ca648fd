#include "index/block.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <tuple>

#include "allocations.h"
#include "test.h"

using namespace histospec;

namespace {

constexpr std::size_t kSizes[] = {0, 1, 7, 8, 4096, 65535, 65536, 65537, 69632, 1 << 20, (5 << 20) + 3};

bool mapped(const void* page) {
  unsigned char resident;
  return mincore(const_cast<void*>(page), 1, &resident) == 0;
}

// Marks all of it, so that memory which two blocks share would show.
void fill(Block& block, std::size_t size, int mark) { std::fill_n(block.data(), size, static_cast<std::byte>(mark)); }
bool filled(Block& block, std::size_t size, int mark) {
  return std::all_of(block.data(), block.data() + size, [&](std::byte b) { return b == static_cast<std::byte>(mark); });
}

}  // namespace

TEST_CASE("A block is zeroed, aligned and large enough") {
  for (std::size_t size : kSizes) {
    CAPTURE(size);
    for (int again = 0; again < 2; ++again) {  // the second may get the memory that the first left dirty
      Block block(size);
      CHECK(filled(block, size, 0));
      CHECK(block.bytes() >= size);
      CHECK(block.bytes() <= size + 4096);
      CHECK_EQ(reinterpret_cast<std::uintptr_t>(block.data()) % alignof(std::max_align_t), 0u);
      fill(block, size, 0xab);
      CHECK(filled(block, size, 0xab));
    }
  }
}

TEST_CASE("Small blocks are on the heap, large ones are not") {
  const std::size_t before = allocations::held();
  {
    const Block small(1000);
    CHECK_EQ(allocations::held(), before + 1000);
    const Block large(1 << 20);
    CHECK_EQ(allocations::held(), before + 1000);
    CHECK_EQ(large.bytes() % 4096, 0u);
  }
  CHECK_EQ(allocations::held(), before);
}

TEST_CASE("A large block returns its memory to the operating system at once") {
  std::optional<Block> block(std::in_place, std::size_t{8} << 20);
  const std::byte* const first = block->data();
  const std::byte* const last = first + block->bytes() - 4096;
  CHECK(mapped(first));
  CHECK(mapped(last));
  block.reset();
  CHECK(!mapped(first));
  CHECK(!mapped(last));
  CHECK_EQ(errno, ENOMEM);
}

TEST_CASE("Moving a block hands its memory over") {
  const std::size_t before = allocations::held();
  for (std::size_t size : kSizes) {
    for (std::size_t other_size : kSizes) {
      Block a(size), b(other_size);
      fill(a, size, 1);
      fill(b, other_size, 2);
      const std::byte* const data = a.data();
      const std::size_t bytes = a.bytes();
      Block c(std::move(a));
      CHECK(c.data() == data);
      CHECK_EQ(c.bytes(), bytes);
      CHECK(a.data() == nullptr);
      CHECK_EQ(a.bytes(), 0u);
      b = std::move(c);
      CHECK(b.data() == data);
      CHECK_EQ(b.bytes(), bytes);
      CHECK(filled(b, size, 1));
      Block empty;
      CHECK_EQ(empty.bytes(), 0u);
      empty = std::move(b);
      CHECK(filled(empty, size, 1));
      a = Block(10);  // one that was moved from can be used again
      fill(a, 10, 3);
      CHECK(filled(empty, size, 1));
    }
  }
  CHECK_EQ(allocations::held(), before);
}

TEST_CASE("A block throws std::bad_alloc without memory, and leaks nothing") {
  const std::size_t before = allocations::held();
  bool thrown = false;
  {
    allocations::Failure failure(0);
    try {
      const Block block(100);
    } catch (const std::bad_alloc&) {
      thrown = true;
    }
  }
  CHECK(thrown);
  CHECK_EQ(allocations::held(), before);
}

TEST_CASE("A layout places its arrays one after another, aligned") {
  const auto place = [](Layout layout) {
    const auto bytes = layout.take_array<std::uint8_t>(13);
    const auto words = layout.take_array<std::int64_t>(3);
    const auto none = layout.take_array<std::int32_t>(0);
    const auto last = layout.take_array<std::uint16_t>(1);
    return std::tuple(bytes, words, none, last, layout.size());
  };
  Block block(std::get<4>(place(Layout(nullptr))));
  const auto [bytes, words, none, last, size] = place(Layout(block.data()));
  const auto at = [&](const auto& array) { return reinterpret_cast<const std::byte*>(array.data()) - block.data(); };
  CHECK_EQ(at(bytes), 0);
  CHECK_EQ(at(words), 16);
  CHECK_EQ(at(last), 40);
  CHECK_EQ(size, 48u);
  CHECK(none.empty());
}
