// Suffix sorting by induced copying: G. Nong, S. Zhang, W. H. Chan, "Two Efficient Algorithms for Linear Time Suffix
// Array Construction", IEEE Transactions on Computers 60(10), 2011.
#pragma once

#include <cstdint>
#include <span>

namespace histospec {

// Writes to `order` the start of every suffix of `text` in ascending order of the suffixes; a suffix that is a prefix
// of another comes first. O(n + alphabet) time. Scratch space while it runs: two words for each number of the alphabet,
// 2n bytes, and at most 2n words more, mostly far less.
//   text      n numbers, each in [0, alphabet); not modified
//   order     n numbers, overwritten
void suffix_array(std::span<const std::uint32_t> text, std::uint32_t alphabet, std::span<std::uint32_t> order);

}  // namespace histospec
