#include "draft/twins.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <stdexcept>

namespace histospec {

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

}  // namespace histospec
