#include "engine/integrity.h"

#include <stdexcept>

namespace histospec {

void check_books(const Registry& registry, const MemoryLedger& ledger) {
  const auto require = [](bool holds, const char* invariant) {
    if (!holds) throw std::logic_error(std::string("engine: ") + invariant);
  };
  MemoryLedger::Totals counted;
  Holding all;
  std::size_t with_twins = 0;
  for (const auto& [name, namespace_] : registry.namespaces()) {
    require(namespace_->booked == namespace_->bytes() && !namespace_->gone, "a namespace has other bytes than booked");
    counted.namespaces += namespace_->booked;
    Holding held{.bytes = namespace_->booked};
    for (const auto& problem : namespace_->problems) {
      require(problem->owner == namespace_.get() && namespace_->problems.contains(problem->key),
              "a problem is not in its namespace's table");
      for (const Problem::Part part : Problem::all_parts) {
        counted.parts[part] += problem->holding(part).bytes;
        held += problem->holding(part);
      }
      counted.waiting_tokens += problem->holding(Problem::kLive).tokens;
      with_twins += problem->twins != nullptr;
      if (problem->twins) problem->twins->check_integrity();
      for (const auto& segment : *problem->segments) segment->check_integrity();
    }
    require(namespace_->members.size() == namespace_->problems.size(),
            "the members of a namespace are not its problems");
    require(held == namespace_->held, "the problems of a namespace hold something else than booked");
    all += held;
  }
  counted.sessions = all.sessions;
  require(registry.by_recency().size() == all.problems, "the recency list misses problems");
  require(registry.with_twins().size() == with_twins, "the list of problems with twins is off");
  const MemoryLedger::Totals booked = ledger.totals();
  require(counted.parts[Problem::kSegments] == booked.parts[Problem::kSegments], "segment bytes are off");
  require(counted.parts[Problem::kItself] == booked.parts[Problem::kItself], "problem bytes are off");
  require(counted.parts[Problem::kLive] == booked.parts[Problem::kLive], "live bytes are off");
  require(counted.parts[Problem::kTwins] == booked.parts[Problem::kTwins], "twin bytes are off");
  require(counted.waiting_tokens == booked.waiting_tokens, "tokens that wait for a segment are off");
  require(registry.place_bytes() == booked.places, "the tables of places are off");
  require(counted.namespaces == booked.namespaces, "namespace bytes are off");
  require(counted.sessions == booked.sessions && booked.sessions == registry.sessions(),
          "sessions and live texts differ");
}

}  // namespace histospec
