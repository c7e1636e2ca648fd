#include "draft/twins.h"

#include <algorithm>
#include <bit>
#include <iterator>
#include <set>
#include <stdexcept>

namespace histospec {
namespace {

// How many tokens the starting values count as, and the most that an entry counts.
constexpr float kTwinDoubt = 8, kMostTokens = 1000;

// Probabilities stay away from 0 and 1.
constexpr float kLeast = 0.001f, kMost = 0.999f;

}  // namespace

std::shared_ptr<const Twin> Twins::of(const ResponseView& response) {
  if (!response.seed) return nullptr;
  const auto turn = std::ranges::find(response.generated, 0);
  const Tokens text =
      response.generated.empty() ? response.tokens : response.tokens.first(turn - response.generated.begin());
  return text.empty() ? nullptr : std::make_shared<const Twin>(text.begin(), text.end());
}

void Twins::add(Key key, std::int64_t epoch, std::shared_ptr<const Twin> twin, bool stored) {
  epochs_[epoch];
  while (epochs_.size() > kEpochs) {
    const auto oldest = epochs_.begin();
    while (!oldest->second.empty()) forget(oldest->second, oldest->second.begin()->first);
    epochs_.erase(oldest);
  }
  const auto its = epochs_.find(epoch);
  if (its == epochs_.end()) return;  // it was the oldest epoch
  for (auto newer = stored ? its : std::next(its); newer != epochs_.end(); ++newer) {
    if (newer->second.contains(key)) return;
  }
  std::shared_ptr<const Twin>& held = its->second[key];
  if (held) held_bytes_ -= bytes_of(*held);
  held_bytes_ += bytes_of(*twin);
  held = std::move(twin);
  for (auto older = epochs_.begin(); older != its; ++older) forget(older->second, key);
}

void Twins::forget(Epoch& epoch, Key key) {
  const auto found = epoch.find(key);
  if (found == epoch.end()) return;
  if (found->second) held_bytes_ -= bytes_of(*found->second);
  epoch.erase(found);
}

std::shared_ptr<const Twin> Twins::find(Key key) const {
  for (const auto& [number, epoch] : epochs_) {
    if (const auto found = epoch.find(key); found != epoch.end()) return found->second;
  }
  return nullptr;
}

std::size_t Twins::bytes_of(const Twin& twin) {
  constexpr std::size_t kNode = sizeof(Epoch::value_type) + sizeof(Twin) + 64;  // of the map and of shared ownership
  return kNode + twin.capacity() * sizeof(Token);
}

void Twins::check_integrity() const {
  std::size_t held = 0;
  std::set<Key> seen;
  for (const auto& [number, epoch] : epochs_) {
    for (const auto& [key, twin] : epoch) {
      if (!twin || twin->empty()) throw std::logic_error("twins: a twin has no text");
      if (!seen.insert(key).second) throw std::logic_error("twins: a key has two twins");
      held += bytes_of(*twin);
    }
  }
  if (held != held_bytes_) throw std::logic_error("twins: bytes are off");
  if (epochs_.size() > kEpochs) throw std::logic_error("twins: too many epochs");
}

std::size_t TwinTrust::class_of(int streak) {
  if (streak == 0) return 0;
  return std::min<std::size_t>(std::bit_width(static_cast<unsigned>(streak - 1)) + 1, kClasses - 1);
}

void TwinTrust::learn(const Agreement& agreement, bool right) {
  const std::size_t streak = class_of(agreement.streak);
  float& probability = right_[kind_of(agreement)][streak];
  float& seen = seen_[kind_of(agreement)][streak];
  probability += ((right ? 1.0f : 0.0f) - probability) / (kTwinDoubt + seen);
  probability = std::clamp(probability, kLeast, kMost);
  seen = std::min(seen + 1, kMostTokens);
}

}  // namespace histospec
