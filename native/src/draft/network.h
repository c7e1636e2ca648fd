// A small network: the inputs of a candidate and the rows of its position -> log-odds. And what it is made of: vectors
// of eight floats, and the correction of its probabilities.
//
//     inputs of the candidate ---+--> 8 hidden (relu) --+--> log-odds
//     rows of the position ------+----------------------+
//
// Each row is a vector added to the hidden layer, and a number added to the log-odds. It learns by gradient descent on
// the logistic loss.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

namespace histospec {

// Eight floats as two vectors of 16 bytes, a size that every x86-64 and Arm64 CPU has. Compilers take larger vectors
// apart element by element.
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

inline Eight load(const float* x) {
  Eight eight;
  std::memcpy(&eight, x, sizeof(eight));
  return eight;
}
inline void store(float* x, const Eight& eight) { std::memcpy(x, &eight, sizeof(eight)); }

// Calls visit(number) for every number of a field: a float, an Eight, or an array of fields. It may change them.
template <typename Field, typename Visit>
void each_number(Field& field, Visit& visit) {
  if constexpr (std::is_same_v<Field, float>) {
    visit(field);
  } else if constexpr (std::is_same_v<Field, Eight>) {
    std::array<float, 8> numbers;
    store(numbers.data(), field);
    for (float& number : numbers) visit(number);
    field = load(numbers.data());
  } else {
    for (auto& part : field) each_number(part, visit);
  }
}

// `kInputs` is at least 8.
template <int kInputs, int kRows>
struct Network {
  using Inputs = std::array<float, kInputs>;
  static constexpr std::size_t kNumbers = 8 * (kInputs + kRows + 1) + kRows + kInputs;

  std::array<Eight, kInputs> inputs;
  std::array<Eight, kRows> rows;
  Eight output;
  std::array<float, kRows> row_odds;
  std::array<float, kInputs> direct;

  // What the rows of a position add.
  struct Position {
    Eight hidden{};
    float odds = 0;
  };
  Position at(std::span<const std::uint8_t> its_rows) const {
    Position position;
    for (int row : its_rows) {
      position.hidden += rows[row];
      position.odds += row_odds[row];
    }
    return position;
  }
  float log_odds(const Position& position, const Inputs& x) const {
    Eight hidden = position.hidden;
    for (int i = 0; i < kInputs; ++i) hidden += x[i] * inputs[i];
    const Eight parts = where_positive(hidden, hidden * output) + load(x.data()) * load(direct.data());
    float odds = position.odds + parts.sum();
    for (int i = 8; i < kInputs; ++i) odds += x[i] * direct[i];
    return odds;
  }
  // Moves the weights by `step`, which is the rate times the error.
  void learn(std::span<const std::uint8_t> its_rows, const Inputs& x, float step) {
    Eight hidden = at(its_rows).hidden;
    for (int i = 0; i < kInputs; ++i) hidden += x[i] * inputs[i];
    const Eight back = where_positive(hidden, step * output);
    output += where_positive(hidden, step * hidden);
    for (int i = 0; i < kInputs; ++i) inputs[i] += x[i] * back;
    store(direct.data(), load(direct.data()) + step * load(x.data()));
    for (int i = 8; i < kInputs; ++i) direct[i] += step * x[i];
    for (int row : its_rows) {
      rows[row] += back;
      row_odds[row] += step;
    }
  }

  // Visits the numbers in the order in which they are saved.
  template <typename Visit>
  void each(Visit& visit) {
    each_number(inputs, visit), each_number(rows, visit), each_number(output, visit);
    each_number(row_odds, visit), each_number(direct, visit);
  }
  static Network of(const std::array<float, kNumbers>& numbers) {
    Network network;
    auto read = [next = numbers.data()](float& number) mutable { number = *next++; };
    network.each(read);
    return network;
  }
};

// A correction of probabilities: the best of several candidates is right a little more or less often than estimated.
// It learns the difference for each tenth of the probability.
struct Correction {
  static constexpr int kTenths = 10;
  // Observations with which the correction of a tenth starts, and the most that it counts.
  static constexpr float kDoubt = 100, kMostSeen = 2000;

  static int tenth(float probability) { return std::min(static_cast<int>(probability * kTenths), kTenths - 1); }
  float corrected(float probability) const {
    return std::clamp(probability + offset[tenth(probability)], 1e-6f, 1 - 1e-6f);
  }
  void saw(float probability, bool right) {
    const int at = tenth(probability);
    const float error = (right ? 1.0f : 0.0f) - corrected(probability);
    offset[at] += error / (kDoubt + seen[at]);
    seen[at] = std::min(seen[at] + 1, kMostSeen);
  }

  // Visits the numbers in the order in which they are saved.
  template <typename Visit>
  void each(Visit& visit) {
    each_number(offset, visit), each_number(seen, visit);
  }
  // Whether numbers that were read make sense.
  bool valid() const {
    return std::ranges::all_of(seen, [](float n) { return n >= 0; });
  }

  std::array<float, kTenths> offset{};
  std::array<float, kTenths> seen{};
};

}  // namespace histospec
