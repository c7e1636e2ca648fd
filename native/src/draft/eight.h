// Eight floats as two vectors of 16 bytes, a size that every x86-64 and Arm64 CPU has. Compilers take larger vectors
// apart element by element.
#pragma once

#include <cstdint>

namespace histospec {

struct Eight {
  using Half [[gnu::vector_size(16)]] = float;
  using Bits [[gnu::vector_size(16)]] = std::int32_t;

  Half low, high;

  static Eight all(float x) { return {Half{x, x, x, x}, Half{x, x, x, x}}; }

  Eight& operator+=(const Eight& other) { return low += other.low, high += other.high, *this; }
  friend Eight operator+(const Eight& a, const Eight& b) { return {a.low + b.low, a.high + b.high}; }
  friend Eight operator-(const Eight& a, const Eight& b) { return {a.low - b.low, a.high - b.high}; }
  friend Eight operator*(const Eight& a, const Eight& b) { return {a.low * b.low, a.high * b.high}; }
  friend Eight operator*(float x, const Eight& a) { return {x * a.low, x * a.high}; }
  float sum() const {
    const Half half = low + high;
    return (half[0] + half[2]) + (half[1] + half[3]);
  }
};

// Applies `change` to each half.
template <typename Change>
Eight halves(const Eight& x, Change change) {
  return {change(x.low), change(x.high)};
}

// The elements of x where `sign` is above 0, and 0 elsewhere.
inline Eight where_positive(const Eight& sign, const Eight& x) {
  const auto keep = [](Eight::Half s, Eight::Half y) {
    return reinterpret_cast<Eight::Half>((s > Eight::Half{}) & reinterpret_cast<Eight::Bits>(y));
  };
  return {keep(sign.low, x.low), keep(sign.high, x.high)};
}

// log2(x) within 0.0002, for x > 0: the exponent, and a polynomial of the mantissa.
inline Eight::Half log2(const Eight::Half& x) {
  const auto bits = reinterpret_cast<Eight::Bits>(x);
  const Eight::Half exponent = __builtin_convertvector(bits >> 23, Eight::Half) - 127;
  const auto m = reinterpret_cast<Eight::Half>((bits & 0x7fffff) | 0x3f800000);
  return exponent - 2.4983532f + (4.0292114f + (-2.0783352f + (0.6260322f - 0.0784407f * m) * m) * m) * m;
}
inline Eight log2(const Eight& x) { return {log2(x.low), log2(x.high)}; }

}  // namespace histospec
