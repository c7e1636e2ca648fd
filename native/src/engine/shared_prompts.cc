// Looks the prompts of one namespace up in the others, to find runs with two names, or with a new name for each epoch.
#include <algorithm>
#include <ranges>

#include "engine/state.h"

namespace histospec {
namespace {

using Asked = std::vector<std::shared_ptr<const Problem>>;
using Others = std::vector<std::shared_ptr<Namespace>>;

// With many namespaces, only a few of the prompts are looked up in each, and the rest only if it knows one of them.
constexpr std::size_t kLookups = 1 << 14;
constexpr std::size_t kFewest = 4;

// Work, in compared tokens: a slice, which takes about a quarter of a millisecond,
constexpr std::size_t kSlice = 1 << 14;
// and all of it, which takes some milliseconds. Namespaces beyond that are skipped.
constexpr std::size_t kMostWork = 1 << 21;
constexpr std::size_t kLookupWork = 16;  // of a lookup that finds nothing
constexpr std::size_t kListWork = 4;     // of a namespace that is listed

// Releases the lock after each slice of work.
class Pace {
 public:
  bool spent() const { return all_ > kMostWork; }
  void worked(std::size_t work, Monitor::Lock& lock) REQUIRES(engine_lock) {
    all_ += work;
    slice_ += work;
    if (slice_ < kSlice) return;
    slice_ = 0;
    Monitor::breathe(lock);
  }

 private:
  std::size_t all_ = 0, slice_ = 0;
};

// The newest problems that their prompt identifies.
void newest(const Namespace& namespace_, std::size_t most, Asked& asked) REQUIRES(engine_lock) {
  std::size_t looked = 0;
  for (const Problem* problem : namespace_.members | std::views::reverse) {
    if (asked.size() == most || ++looked > 4 * most) return;  // most problems here have ids
    if (!problem->key.prompt.empty()) asked.push_back(problem->shared_from_this());
  }
}

// How many of the prompts the namespace has finished responses to.
std::size_t known(const Namespace& namespace_, std::span<const std::shared_ptr<const Problem>> asked, Pace& pace,
                  Monitor::Lock& lock) REQUIRES(engine_lock) {
  std::size_t found = 0;
  for (const auto& problem : asked) {
    const auto same = namespace_.problems.find(problem->key);  // compares tokens where the hash is the same
    const bool there = same != namespace_.problems.end();
    found += there && (*same)->known();
    pace.worked(kLookupWork + (there ? problem->key.prompt.size() : 0), lock);
  }
  return found;
}

}  // namespace

SharedPrompts Engine::shared_prompts(const std::string& name, std::size_t most) const {
  // Declared before the lock, so that what is dropped meanwhile is destroyed after it.
  Asked asked;
  Others others;
  std::shared_ptr<Namespace> namespace_;
  SharedPrompts shared;
  Monitor::Lock lock(state_->monitor);
  const Registry& registry = state_->registry;
  namespace_ = registry.find_namespace(name);
  if (!namespace_) return shared;
  newest(*namespace_, most, asked);
  shared.asked = asked.size();
  if (asked.empty()) return shared;
  Pace pace;
  others.reserve(registry.namespaces().size());
  for (const auto& [other, held] : registry.namespaces()) {
    if (held != namespace_ && !held->problems.empty()) others.push_back(held);
  }
  const std::size_t few = std::min(asked.size(), std::max(kFewest, kLookups / std::max<std::size_t>(1, others.size())));
  pace.worked(kListWork * others.size(), lock);
  const std::span<const std::shared_ptr<const Problem>> all = asked;
  for (const auto& other : others) {
    if (pace.spent()) break;
    std::size_t number = known(*other, all.first(few), pace, lock);
    if (number > 0) number += known(*other, all.subspan(few), pace, lock);
    if (number > 0) shared.namespaces.emplace_back(other->name, number);
  }
  return shared;
}

}  // namespace histospec
