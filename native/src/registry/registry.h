// The registry: namespaces, their problems, and the sessions that run in them; who was used how recently.
#pragma once

#include <list>
#include <memory>
#include <string>
#include <unordered_map>

#include "registry/ledger.h"
#include "registry/session.h"

namespace histospec {

class Registry {
 public:
  // `index_tokens`: what the index of a namespace may hold.
  Registry(MemoryLedger& ledger, std::size_t index_tokens) : ledger_(ledger), index_tokens_(index_tokens) {}

  using Namespaces = std::unordered_map<std::string, std::shared_ptr<Namespace>>;
  const Namespaces& namespaces() const REQUIRES(engine_lock) { return namespaces_; }
  // Made, if it is new.
  std::shared_ptr<Namespace> namespace_named(const std::string& name) REQUIRES(engine_lock);
  // Null: there is none.
  std::shared_ptr<Namespace> find_namespace(const std::string& name) const REQUIRES(engine_lock);
  // Takes a dropped namespace away that has no problems any more.
  void erase_if_empty(Namespace& namespace_) REQUIRES(engine_lock);
  // What namespaces had counted that are gone.
  const NamespaceStats& erased_counters() const REQUIRES(engine_lock) { return erased_; }

  // The problem, as the most recently used one; if it is new, it is made and takes the key. If nobody
  // uses it now, a new one is the least recently used one, and another one stays where it is.
  std::shared_ptr<Problem> problem(Namespace& namespace_, ProblemKey&& key, bool used = true) REQUIRES(engine_lock);
  // The problem of a session: the one that is known by this key, else the one of which this is a later turn, else new.
  std::shared_ptr<Problem> problem_of(Namespace& namespace_, ProblemKey&& key, Tokens prompt) REQUIRES(engine_lock);
  // Null: there is none.
  const Problem* find_problem(const std::string& name, const ProblemKey& key) const REQUIRES(engine_lock);
  // May destroy it. It has neither live text nor twins.
  void erase(Problem& problem) REQUIRES(engine_lock);

  // Least recently used first: all problems, and those that have twins.
  const std::list<Problem*>& by_recency() const REQUIRES(engine_lock) { return recency_; }
  const std::list<Problem*>& with_twins() const REQUIRES(engine_lock) { return twinned_; }
  // `first`: they are to go before all others.
  void list_twins(Problem& problem, bool first) REQUIRES(engine_lock);
  void unlist_twins(Problem& problem) REQUIRES(engine_lock);

  // The problems of a namespace that a drop with this number has not visited yet, one by one; null after the last.
  // Those that come meanwhile are not visited.
  std::uint64_t next_drop() REQUIRES(engine_lock) { return ++drops_; }
  Problem* next_to_drop(Namespace& namespace_, std::uint64_t number) REQUIRES(engine_lock);

  std::size_t sessions() const REQUIRES(engine_lock) { return sessions_.size(); }
  SessionId add(std::unique_ptr<Session> session) REQUIRES(engine_lock);
  void remove(SessionId id) REQUIRES(engine_lock) { sessions_.erase(id); }
  // Null: it is not open.
  Session* find_session(SessionId id) const REQUIRES(engine_lock);
  // Throws UnknownSession.
  Session& session(SessionId id) const REQUIRES(engine_lock);

 private:
  // The problem becomes the most recently used one.
  void use(Problem& problem) REQUIRES(engine_lock);

  MemoryLedger& ledger_;
  const std::size_t index_tokens_;
  Namespaces namespaces_ GUARDED_BY(engine_lock);
  NamespaceStats erased_ GUARDED_BY(engine_lock);
  std::list<Problem*> recency_ GUARDED_BY(engine_lock);
  std::list<Problem*> twinned_ GUARDED_BY(engine_lock);
  std::uint64_t drops_ GUARDED_BY(engine_lock) = 0;
  std::unordered_map<SessionId, std::unique_ptr<Session>> sessions_ GUARDED_BY(engine_lock);
  SessionId last_session_ GUARDED_BY(engine_lock) = 0;
};

}  // namespace histospec
