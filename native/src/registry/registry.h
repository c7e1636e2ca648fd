// The registry: tenants, namespaces, their problems, the order in which problems were last used, and open sessions.
#pragma once

#include <list>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>

#include "registry/ledger.h"

namespace histospec {

class Registry {
 public:
  // `index_tokens`: how many tokens the index of a namespace may hold.
  Registry(MemoryLedger& ledger, std::size_t index_tokens) : ledger_(ledger), index_tokens_(index_tokens) {}

  // A tree, because clients choose the names.
  using Namespaces = std::map<std::string, std::shared_ptr<Namespace>>;
  const Namespaces& namespaces() const REQUIRES(engine_lock) { return namespaces_; }
  // The namespace with this name; adds it if it is new.
  std::shared_ptr<Namespace> namespace_named(const std::string& name) REQUIRES(engine_lock);
  // Null if there is none.
  std::shared_ptr<Namespace> find_namespace(const std::string& name) const REQUIRES(engine_lock);
  // A tree, because its nodes stay where they are.
  using Tenants = std::map<std::string, Tenant>;
  Tenants& tenants() REQUIRES(engine_lock) { return tenants_; }
  // Gives a namespace to a tenant when it is made; one that exists keeps its tenant.
  void assign(const std::string& name, const std::string& tenant) REQUIRES(engine_lock);
  // Removes a dropped namespace that has no problems left.
  void erase_if_empty(Namespace& namespace_) REQUIRES(engine_lock);
  // The sums of the counters of removed namespaces.
  const NamespaceStats& erased_counters() const REQUIRES(engine_lock) { return erased_; }

  // The problem with this key; adds it, with the key, if it is new. If `used`, it becomes the most recently used
  // problem; otherwise a new problem becomes the least recently used one, and a known one keeps its place.
  std::shared_ptr<Problem> problem(Namespace& namespace_, ProblemKey&& key, bool used = true) REQUIRES(engine_lock);
  // The problem of a session: the one with this key, else the one of which this is a later turn, else a new one, which
  // takes the key. Null, and the key is unchanged, if the namespace was erased meanwhile: the search releases the lock
  // after each slice.
  std::shared_ptr<Problem> problem_of(Namespace& namespace_, ProblemKey& key, Tokens prompt, Monitor::Lock& lock)
      REQUIRES(engine_lock);
  // Null if there is none.
  const Problem* find_problem(const std::string& name, const ProblemKey& key) const REQUIRES(engine_lock);
  // Removes a problem that has neither live text nor twins. May destroy it.
  void erase(Problem& problem) REQUIRES(engine_lock);

  // Moves a problem to the end of a shelf, or to its beginning.
  void shelve(Problem& problem, Tenant::Shelf shelf, bool first = false) REQUIRES(engine_lock);

  // `first`: evict these twins before all others.
  void list_twins(Problem& problem, bool first) REQUIRES(engine_lock);
  void unlist_twins(Problem& problem) REQUIRES(engine_lock);

  // Returns the problems of a namespace that the drop with this number has not visited yet, one by one; null after the
  // last. The drop does not visit problems that come meanwhile.
  std::uint64_t next_drop() REQUIRES(engine_lock) { return ++drops_; }
  Problem* next_to_drop(Namespace& namespace_, std::uint64_t number) REQUIRES(engine_lock);

  SessionId add(std::unique_ptr<Session> session) REQUIRES(engine_lock);
  void remove(SessionId id) REQUIRES(engine_lock) { sessions_.erase(id); }
  // Null if it is not open.
  Session* find_session(SessionId id) const REQUIRES(engine_lock);
  // Throws UnknownSession.
  Session& session(SessionId id) const REQUIRES(engine_lock);

  // Counts everything again and compares it with the ledger: invariants that hold whenever no thread holds the lock.
  // Throws std::logic_error naming the invariant that fails.
  void check_integrity() const REQUIRES(engine_lock);

 private:
  // Makes the problem the most recently used one.
  void use(Problem& problem) REQUIRES(engine_lock);
  // The bytes of the tables with which sessions know their noise.
  std::size_t noise_bytes() const REQUIRES(engine_lock);

  MemoryLedger& ledger_;
  const std::size_t index_tokens_;
  Tenants tenants_ GUARDED_BY(engine_lock);
  std::map<std::string, Tenant*> assigned_ GUARDED_BY(engine_lock);  // by namespace; others belong to the tenant ""
  Namespaces namespaces_ GUARDED_BY(engine_lock);
  NamespaceStats erased_ GUARDED_BY(engine_lock);
  std::uint64_t drops_ GUARDED_BY(engine_lock) = 0;
  std::unordered_map<SessionId, std::unique_ptr<Session>> sessions_ GUARDED_BY(engine_lock);
  SessionId last_session_ GUARDED_BY(engine_lock) = 0;
};

}  // namespace histospec
