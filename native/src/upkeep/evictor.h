// The evictor: keeps the engine within its memory budget. It first evicts copies of what the history has: namespace
// indexes beyond their share, and twins. Then it evicts the least recently used problems, and then the oldest segments
// of problems in use.
//
// Tenants that hold something have equal shares of the budget. While memory is short, the evictor takes from the tenant
// that is furthest over its share, down to that share. So a tenant alone may fill the budget, and others still get
// their shares. A tenant that has a limit of its own loses what is beyond it, even if memory is not short.
#pragma once

#include <atomic>
#include <thread>

#include "upkeep/contents.h"

namespace histospec {

class Evictor {
 public:
  Evictor(std::size_t budget, Contents& contents) : budget_(budget), contents_(contents) {}

  // Evicts until the budget holds or nothing is left to evict. Releases the lock in between.
  void make_room(Monitor::Lock& lock) REQUIRES(engine_lock);
  // Evicts a little, and leaves the rest to the housekeeper.
  void relieve() REQUIRES(engine_lock);
  // Whether the housekeeper has something to evict; catch_up() evicts some of it.
  bool behind() const REQUIRES(engine_lock) { return behind_; }
  void catch_up() REQUIRES(engine_lock);
  // Whether it has ever evicted any history. Needs no lock.
  bool has_evicted() const { return has_evicted_; }

 private:
  bool short_of_memory() const REQUIRES(engine_lock) { return contents_.ledger.memory_bytes() > budget_; }
  // Whether memory is short, or a tenant over its own limit.
  bool over() const REQUIRES(engine_lock);
  // How many bytes a tenant has to give. `last`: while memory is short, all of them, and not only those over its share.
  std::size_t excess(const Tenant& tenant, bool last) const REQUIRES(engine_lock);
  // The tenant with the largest excess that this pass has not visited; null if there is none.
  Tenant* furthest(bool last) REQUIRES(engine_lock);
  bool evict_some() REQUIRES(engine_lock);
  // Evicts from a tenant until it has no excess. Adds its work; returns false if that is enough for one slice.
  bool evict_from(Tenant& tenant, bool last, std::size_t& work) REQUIRES(engine_lock);
  bool shrink(Namespace& namespace_) REQUIRES(engine_lock);

  const std::size_t budget_;
  Contents& contents_;
  std::size_t exhausted_at_ GUARDED_BY(engine_lock) = 0;  // evictable bytes when nothing was left; tries again above it
  bool behind_ GUARDED_BY(engine_lock) = false;
  std::atomic<bool> has_evicted_ = false;
};

// The housekeeper: a thread that evicts, tidies live text and frees memory, if that takes longer than a caller should
// wait.
class Housekeeper {
 public:
  Housekeeper(Contents& contents, Evictor& evictor);
  ~Housekeeper();
  Housekeeper(const Housekeeper&) = delete;
  Housekeeper& operator=(const Housekeeper&) = delete;

  bool idle() const REQUIRES(engine_lock) { return !contents_.untidy() && !evictor_.behind(); }

 private:
  void run();

  Contents& contents_;
  Evictor& evictor_;
  bool stopping_ GUARDED_BY(engine_lock) = false;
  std::thread thread_;  // last, because it uses all members above
};

}  // namespace histospec
