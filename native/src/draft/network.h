// A small network: the inputs of a candidate and the rows of its position -> log-odds.
//
//     inputs of the candidate ---+--> 8 hidden (relu) --+--> log-odds
//     rows of the position ------+----------------------+
//
// Each row is a vector added to the hidden layer, and a number added to the log-odds. It learns by gradient descent on
// the logistic loss.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <span>

#include "draft/eight.h"

namespace histospec {

inline Eight load(const float* x) {
  Eight eight;
  std::memcpy(&eight, x, sizeof(eight));
  return eight;
}
inline void store(float* x, const Eight& eight) { std::memcpy(x, &eight, sizeof(eight)); }

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

  // Visits the parts in the order in which they are saved.
  template <typename Weights, typename Visit>
  static void each_part(Weights& w, Visit visit) {
    visit(w.inputs), visit(w.rows), visit(w.output), visit(w.row_odds), visit(w.direct);
  }
  static Network of(const std::array<float, kNumbers>& numbers) {
    Network network;
    const float* next = numbers.data();
    each_part(network, [&next](auto& part) {
      std::memcpy(&part, next, sizeof(part));
      next += sizeof(part) / sizeof(float);
    });
    return network;
  }
};

}  // namespace histospec
