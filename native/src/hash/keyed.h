// The hash of everything that clients choose: tokens, prompts, ids.
//
// Each process draws a secret key. Without it, a client cannot make many values of one hash, which would turn lookups
// under the engine's lock into long searches. Hashes are therefore different in every process: never store one.
//
// A multiplication takes 64 by 64 bits and folds the 128 bits of the product, like wyhash: nearly as fast as a hash
// without a key.
#pragma once

#include <array>
#include <cstdint>
#include <random>
#include <string_view>

#include "histospec/types.h"

namespace histospec {

struct HashKey {
  std::uint64_t start;
  std::uint64_t multiplier;  // odd

  static std::uint64_t folded(std::uint64_t a, std::uint64_t b) {
    __extension__ using Product = unsigned __int128;
    const Product product = static_cast<Product>(a) * b;
    return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
  }
  static HashKey random() {
    std::random_device device;
    const auto word = [&device] { return std::uint64_t{device()} << 32 | device(); };
    const std::uint64_t start = word();
    return {start, word() | 1};
  }

  // Two multiplications, by the secret and by a constant of wyhash: after the first alone, tokens that count up could
  // fall into few slots, with one key in a hundred.
  std::uint64_t next(std::uint64_t hash, std::uint64_t value) const {
    return folded(folded(hash ^ value, multiplier) ^ start, 0xa0761d6478bd642full);
  }
  std::uint64_t of(std::uint64_t value) const { return next(start, value); }
  std::uint64_t of(Token a, Token b) const {
    return of(std::uint64_t{static_cast<std::uint32_t>(a)} << 32 | static_cast<std::uint32_t>(b));
  }
  std::uint64_t of(Tokens tokens) const {
    std::uint64_t hash = start;
    for (const Token token : tokens) hash = next(hash, static_cast<std::uint32_t>(token));
    return hash;
  }
  std::uint64_t of(std::string_view text) const {
    std::uint64_t hash = start;
    for (const char c : text) hash = next(hash, static_cast<unsigned char>(c));
    return hash;
  }
};

// The key of this process.
inline const HashKey hash_key = HashKey::random();

}  // namespace histospec
