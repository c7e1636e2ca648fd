// Random texts with the hard cases of real ones: small alphabets, runs, periods, copies of each other.
#pragma once

#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "histospec/types.h"

namespace histospec::testing {

class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}

  // Evenly in [0, n).
  std::size_t below(std::size_t n) { return static_cast<std::size_t>(engine_() % n); }
  std::size_t between(std::size_t low, std::size_t high) { return low + below(high - low + 1); }
  bool one_in(std::size_t n) { return below(n) == 0; }

  // Tokens in [0, alphabet): noise, a run, a period, Fibonacci, or noise with a copied piece.
  std::vector<Token> text(std::size_t size, std::size_t alphabet) {
    std::vector<Token> out(size);
    const std::size_t kind = below(5), period = between(1, 7);
    std::vector<Token> fibonacci = {0}, before = {1};
    while (kind == 3 && fibonacci.size() < size) {
      std::vector<Token> next = fibonacci;
      next.insert(next.end(), before.begin(), before.end());
      before = std::exchange(fibonacci, next);
    }
    for (std::size_t i = 0; i < size; ++i) {
      if (kind == 1) {
        out[i] = static_cast<Token>(one_in(50) ? below(alphabet) : 0);
      } else if (kind == 2 && i >= period) {
        out[i] = out[i - period];
      } else if (kind == 3) {
        out[i] = static_cast<Token>(fibonacci[i] % alphabet);
      } else if (kind == 4 && i > size / 2) {
        out[i] = out[i - size / 2];
      } else {
        out[i] = static_cast<Token>(below(alphabet));
      }
    }
    return out;
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace histospec::testing
