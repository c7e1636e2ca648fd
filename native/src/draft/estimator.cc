#include "draft/estimator.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <stdexcept>

#include "draft/starting_weights.h"

namespace histospec {
namespace {

constexpr float kRate = 0.002f;
constexpr float kBiasRate = 0.1f;
constexpr float kRemembered = 1000;  // steps that count for the yield
// A migration from an older version would go before the check of the version in restore().
constexpr std::string_view kStateVersion = "HistoSpec estimator 1\n";
constexpr float kMostWeight = 1e6f;
constexpr float kMostOfStep = 0.9f * kMostWeight / kRemembered;  // tokens; restore() refuses larger sums

// The log-odds of `n` of `total`; 0 if `total` is 0.
Eight stretch(const Eight& n, const Eight& total) {
  constexpr float kLn2 = 0.6931472f;
  const Eight prior = Eight::all(0.3f), others = total - n;
  return kLn2 * (log2(n + prior) - log2(where_positive(others, others) + prior));
}

std::uint16_t slot(std::uint32_t key) {
  return static_cast<std::uint16_t>((key * 2654435761u) >> (32 - Estimator::kBiasBits));
}

}  // namespace

const Estimator::Weights& Estimator::starting() {
  static const Weights weights = Weights::of(kStartingWeights);
  return weights;
}

void Estimator::describe(const Evidence& evidence, Token previous, int run, Features& features) {
  float all = 0, aligned = 0, count = 0, deepest_count = 0;
  std::array<float, kSourceCount> votes{};
  int deepest = 0, second = 0;  // levels
  evidence.each([&](const Tally& tally) {
    for (int source = 0; source < kSourceCount; ++source) votes[source] += tally.votes[source];
    aligned += tally.aligned;
    count += tally.count;
    if (tally.level() > deepest) {
      second = deepest, deepest = tally.level(), deepest_count = 0;
    } else {
      second = std::max<int>(second, tally.level());
    }
    if (tally.level() == deepest) deepest_count += tally.at_level;
  });
  for (float v : votes) all += v;
  const Eight totals = {{all, aligned, votes[0], votes[1]}, {votes[2], votes[3], count, deepest_count}};

  features.size = static_cast<int>(evidence.candidates().size());
  for (int source = 0; source < kTrainedSources; ++source) {
    features.rows[source] =
        static_cast<std::uint8_t>(source * kLevels + evidence.longest_level(static_cast<Source>(source)));
  }
  const int run_class = std::min(static_cast<int>(std::bit_width(static_cast<unsigned>(run) + 1)), kRunClasses) - 1;
  features.rows[kTrainedSources] = static_cast<std::uint8_t>(kTrainedSources * kLevels + run_class);
  for (int c = 0; c < features.size; ++c) {
    const Tally& tally = evidence[evidence.candidates()[c]];
    const auto token = static_cast<std::uint32_t>(tally.token);
    features.slots[c] = {slot(token), slot(static_cast<std::uint32_t>(previous) * 70001u + token)};
    const bool at_top = tally.level() == deepest;
    const auto& v = tally.votes;
    const Eight got = {{tally.all(), tally.aligned, v[0], v[1]},
                       {v[2], v[3], static_cast<float>(tally.count), at_top ? static_cast<float>(tally.at_level) : 0}};
    store(features.x[c].data(), stretch(got, totals));
    features.x[c][8] = static_cast<float>(tally.level() - (at_top ? second : deepest)) * 0.2f;
    features.x[c][9] = static_cast<float>(tally.level()) * 0.2f;
  }
}

void Estimator::estimate(const Features& features, std::span<float, kMaxCandidates> probabilities) const {
  const Weights& w = weights();
  const Weights::Position position = w.at(features.rows);
  for (int c = 0; c < features.size; ++c) {
    float odds = w.log_odds(position, features.x[c]);
    for (int b = 0; net_ && b < 2; ++b) odds += net_->biases[b][features.slots[c][b]];
    probabilities[c] = 1.0f / (1.0f + std::exp(-std::clamp(odds, -12.0f, 12.0f)));
  }
}

void Estimator::learn(const Features& features, int candidate, float probability, bool right) {
  if (!net_) {
    net_ = std::make_unique<Net>();
    net_->weights = starting();
  }
  const float error = (right ? 1.0f : 0.0f) - probability;
  net_->weights.learn(features.rows, features.x[candidate], kRate * error);
  for (int b = 0; b < 2; ++b) net_->biases[b][features.slots[candidate][b]] += kBiasRate * error;
}

float Estimator::speed_up(float verify_cost, float most) const {
  return std::clamp(yield_.tokens / (yield_.steps + verify_cost * yield_.drafted), 1.0f, most);
}

void Estimator::saw_step(float tokens, float drafted) {
  constexpr float kKept = 1 - 1 / kRemembered;
  yield_.tokens = yield_.tokens * kKept + std::min(tokens, kMostOfStep);
  yield_.steps = yield_.steps * kKept + 1;
  yield_.drafted = yield_.drafted * kKept + std::min(drafted, kMostOfStep);
}

std::string Estimator::state() {
  if (!net_) return {};
  std::string state(kStateVersion);
  state.reserve(state.size() + sizeof(Net) + sizeof(Foresight) + sizeof(Yield) + sizeof(Correction));
  auto write = [&state](float number) {
    const auto bits = std::bit_cast<std::uint32_t>(number);
    for (int shift = 0; shift < 32; shift += 8) state.push_back(static_cast<char>(bits >> shift));
  };
  each(write);
  return state;
}

void Estimator::restore(std::string_view state) {
  if (!state.starts_with(kStateVersion)) {
    throw std::invalid_argument("state: is not a state of this version of the estimator");
  }
  std::string_view left = state.substr(kStateVersion.size());
  auto read = [&left](float& number) {
    if (left.size() < sizeof(number)) throw std::invalid_argument("state: is too short");
    std::uint32_t bits = 0;
    for (int i = 0; i < 4; ++i) bits |= static_cast<std::uint32_t>(static_cast<std::uint8_t>(left[i])) << 8 * i;
    left.remove_prefix(sizeof(number));
    number = std::bit_cast<float>(bits);
    if (!(std::abs(number) < kMostWeight)) throw std::invalid_argument("state: holds a number out of range");
  };
  Estimator restored;
  restored.net_ = std::make_unique<Net>();
  restored.each(read);
  if (!left.empty()) throw std::invalid_argument("state: is too long");
  const auto& [tokens, steps, drafted] = restored.yield_;
  if (!(restored.correction_.valid() && restored.foresight.valid() && steps > 0 && tokens > 0 && drafted >= 0)) {
    throw std::invalid_argument("state: holds a number out of range");
  }
  *this = std::move(restored);
}

}  // namespace histospec
