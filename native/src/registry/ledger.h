// The ledger: the bytes of everything in the engine, and the problems, sessions, responses and tokens of each
// namespace. It is kept up to date instead of counted, because the memory budget needs it at every step.
//
// Every change of a part of a problem happens during the life of a Change, which compares the part before and after.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "registry/monitor.h"
#include "registry/namespace.h"
#include "registry/problem.h"

namespace histospec {

class MemoryLedger {
 public:
  class Change;
  class Merge;

  // Books a problem that is added, or removed, with its present parts.
  void enter(const Problem& problem) REQUIRES(engine_lock);
  void leave(const Problem& problem) REQUIRES(engine_lock);
  // Books what a namespace holds besides its problems, after a change or when the namespace is new.
  void update(Namespace& namespace_) REQUIRES(engine_lock);
  void leave(Namespace& namespace_) REQUIRES(engine_lock);

  // Books the tables with which sessions know their noise, after a change.
  void change_noise(std::size_t before, std::size_t after) REQUIRES(engine_lock);

  std::size_t memory_bytes() const REQUIRES(engine_lock);
  // The part that cannot be evicted: running sessions and responses that have just finished. Needs no lock.
  std::size_t running_bytes() const { return running_.load(std::memory_order_relaxed); }
  std::size_t evictable_bytes() const REQUIRES(engine_lock) { return memory_bytes() - running_bytes(); }
  // Tokens of finished responses that are not in a segment yet.
  std::size_t waiting_tokens() const REQUIRES(engine_lock) { return waiting_tokens_; }

  // All bookings, for Registry::check_integrity().
  struct Totals {
    std::array<std::size_t, Problem::kParts> parts{};  // bytes of problems, by part
    std::size_t namespaces = 0, sessions = 0, noise = 0, waiting_tokens = 0;

    bool operator==(const Totals&) const = default;
  };
  Totals totals() const REQUIRES(engine_lock) { return {parts_, namespaces_, sessions_, noise_, waiting_tokens_}; }

 private:
  void book(const Problem& problem, Problem::Part part, const Holding& before, const Holding& after)
      REQUIRES(engine_lock);
  void count_running() REQUIRES(engine_lock);

  std::array<std::size_t, Problem::kParts> parts_ GUARDED_BY(engine_lock){};
  std::size_t namespaces_ GUARDED_BY(engine_lock) = 0;
  std::size_t merging_ GUARDED_BY(engine_lock) = 0;
  std::size_t sessions_ GUARDED_BY(engine_lock) = 0;
  std::size_t noise_ GUARDED_BY(engine_lock) = 0;
  std::size_t waiting_tokens_ GUARDED_BY(engine_lock) = 0;
  std::atomic<std::size_t> running_ = 0;  // the sum of its parts above
};

// Books the change of a part of a problem during its life. The lock is held when it begins and when it ends.
class MemoryLedger::Change {
 public:
  Change(MemoryLedger& ledger, const Problem& problem, Problem::Part part) REQUIRES(engine_lock)
      : ledger_(ledger), problem_(problem), part_(part), before_(problem.holding(part)) {}
  ~Change() {
    assert_locked();
    ledger_.book(problem_, part_, before_, problem_.holding(part_));
  }
  Change(const Change&) = delete;
  Change& operator=(const Change&) = delete;

  const Holding& before() const { return before_; }

 private:
  MemoryLedger& ledger_;
  const Problem& problem_;
  const Problem::Part part_;
  const Holding before_;
};

// Books the memory that merging a namespace index takes, during its life. The lock is held when it begins and ends.
class MemoryLedger::Merge {
 public:
  Merge(MemoryLedger& ledger, Namespace& namespace_, std::size_t bytes) REQUIRES(engine_lock)
      : ledger_(ledger), merged_(namespace_), bytes_(bytes) {
    ledger_.merging_ += bytes_;
    merged_.merging = true;
  }
  ~Merge() {
    assert_locked();
    merged_.merging = false;
    ledger_.merging_ -= bytes_;
  }
  Merge(const Merge&) = delete;
  Merge& operator=(const Merge&) = delete;

 private:
  MemoryLedger& ledger_;
  Namespace& merged_;
  const std::size_t bytes_;
};

}  // namespace histospec
