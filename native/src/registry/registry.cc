#include "registry/registry.h"

#include <stdexcept>

namespace histospec {

std::shared_ptr<Namespace> Registry::namespace_named(const std::string& name) {
  if (auto found = find_namespace(name)) return found;
  const auto assigned = assigned_.find(name);
  Tenant& tenant = assigned == assigned_.end() ? tenants_[""] : *assigned->second;
  const auto made = namespaces_.emplace(name, std::make_shared<Namespace>(name, index_tokens_, tenant)).first->second;
  ledger_.update(*made);
  return made;
}

void Registry::assign(const std::string& name, const std::string& tenant) {
  if (tenant.empty()) {
    assigned_.erase(name);
  } else {
    assigned_[name] = &tenants_[tenant];
  }
}

std::shared_ptr<Namespace> Registry::find_namespace(const std::string& name) const {
  const auto found = namespaces_.find(name);
  return found == namespaces_.end() ? nullptr : found->second;
}

void Registry::erase_if_empty(Namespace& namespace_) {
  if (!namespace_.emptied || !namespace_.problems.empty() || namespace_.gone) return;
  erased_.add_counted(namespace_.counters);
  ledger_.leave(namespace_);
  namespaces_.erase(namespaces_.find(namespace_.name));  // may destroy it
}

std::shared_ptr<Problem> Registry::problem(Namespace& namespace_, ProblemKey&& key, bool used) {
  const auto found = namespace_.problems.find(key);
  if (found != namespace_.problems.end()) {
    if (used) use(**found);
    return *found;
  }
  const auto problem = std::make_shared<Problem>(std::move(key));
  problem->owner = &namespace_;
  problem->dropped = drops_;
  std::list<Problem*> node = {problem.get()}, member = {problem.get()};
  const auto inserted = namespace_.problems.insert(problem).first;
  try {
    namespace_.prompts.add(*problem);
  } catch (...) {
    namespace_.problems.erase(inserted);
    throw;
  }
  problem->on_shelf = node.begin();
  std::list<Problem*>& recent = namespace_.tenant.shelves[Tenant::kRecent];
  recent.splice(used ? recent.end() : recent.begin(), node);
  problem->member = member.begin();
  namespace_.members.splice(namespace_.members.end(), member);
  ledger_.enter(*problem);
  return problem;
}

void Registry::use(Problem& problem) {
  shelve(problem, Tenant::kRecent);
  Tenant& tenant = problem.owner->tenant;
  if (problem.twins) tenant.twinned.splice(tenant.twinned.end(), tenant.twinned, problem.twinned);
}

void Registry::shelve(Problem& problem, Tenant::Shelf shelf, bool first) {
  auto& shelves = problem.owner->tenant.shelves;
  const auto place = first ? shelves[shelf].begin() : shelves[shelf].end();
  shelves[shelf].splice(place, shelves[problem.shelf], problem.on_shelf);
  problem.shelf = shelf;
}

std::shared_ptr<Problem> Registry::problem_of(Namespace& namespace_, ProblemKey& key, Tokens prompt,
                                              Monitor::Lock& lock) {
  if (key.id.empty() && !namespace_.problems.contains(key)) {
    Problem* const earlier = namespace_.prompts.continued_by(prompt, lock);
    if (namespace_.gone) return nullptr;
    if (earlier) {
      use(*earlier);
      return earlier->shared_from_this();
    }
  }
  return problem(namespace_, std::move(key));
}

const Problem* Registry::find_problem(const std::string& name, const ProblemKey& key) const {
  const auto namespace_ = find_namespace(name);
  if (!namespace_) return nullptr;
  const auto found = namespace_->problems.find(key);
  return found == namespace_->problems.end() ? nullptr : found->get();
}

void Registry::erase(Problem& problem) {
  ledger_.leave(problem);
  Namespace& namespace_ = *problem.owner;
  namespace_.tenant.shelves[problem.shelf].erase(problem.on_shelf);
  namespace_.members.erase(problem.member);
  namespace_.prompts.remove(problem);
  namespace_.problems.erase(namespace_.problems.find(problem.key));
}

void Registry::list_twins(Problem& problem, bool first) {
  std::list<Problem*>& twinned = problem.owner->tenant.twinned;
  problem.twinned = twinned.insert(first ? twinned.begin() : twinned.end(), &problem);
}

void Registry::unlist_twins(Problem& problem) { problem.owner->tenant.twinned.erase(problem.twinned); }

Problem* Registry::next_to_drop(Namespace& namespace_, std::uint64_t number) {
  // Visited problems and new ones are at the end of the list.
  if (namespace_.members.empty() || namespace_.members.front()->dropped >= number) return nullptr;
  Problem* problem = namespace_.members.front();
  namespace_.members.splice(namespace_.members.end(), namespace_.members, namespace_.members.begin());
  problem->dropped = number;
  return problem;
}

SessionId Registry::add(std::unique_ptr<Session> session) {
  sessions_.emplace(last_session_ + 1, std::move(session));
  return ++last_session_;
}

std::size_t Registry::noise_bytes() const {
  std::size_t bytes = 0;
  for (const auto& [id, session] : sessions_) bytes += session->noise_bytes();
  return bytes;
}

Session* Registry::find_session(SessionId id) const {
  const auto found = sessions_.find(id);
  return found == sessions_.end() ? nullptr : found->second.get();
}

Session& Registry::session(SessionId id) const {
  if (Session* found = find_session(id)) return *found;
  throw UnknownSession("session " + std::to_string(id) + " is not open");
}

void Registry::check_integrity() const {
  const auto require = [](bool holds, const char* invariant) {
    if (!holds) throw std::logic_error(std::string("engine: ") + invariant);
  };
  MemoryLedger::Totals counted;
  Holding all;
  std::size_t with_twins = 0;
  std::map<const Tenant*, std::size_t> its_bytes;
  for (const auto& [name, namespace_] : namespaces_) {
    require(namespace_->booked == namespace_->bytes() && !namespace_->gone, "a namespace has other bytes than booked");
    counted.namespaces += namespace_->booked;
    Holding held{.bytes = namespace_->booked};
    for (const auto& problem : namespace_->problems) {
      require(problem->owner == namespace_.get() && namespace_->problems.contains(problem->key),
              "a problem is not in its namespace's table");
      for (const Problem::Part part : Problem::all_parts) {
        counted.parts[part] += problem->holding(part).bytes;
        held.change({}, problem->holding(part));
      }
      counted.waiting_tokens += problem->holding(Problem::kLive).tokens;
      with_twins += problem->twins != nullptr;
      if (problem->twins) problem->twins->check_integrity();
      for (const auto& segment : *problem->segments) segment->check_integrity();
    }
    require(namespace_->members.size() == namespace_->problems.size(),
            "the members of a namespace are not its problems");
    require(held == namespace_->held, "the problems of a namespace hold something else than booked");
    all.change({}, held);
    its_bytes[&namespace_->tenant] += held.bytes;
  }
  std::size_t on_shelves = 0, in_twins = 0;
  for (const auto& [name, tenant] : tenants_) {
    require(tenant.bytes == its_bytes[&tenant], "a tenant holds other bytes than its namespaces");
    for (std::uint8_t shelf = 0; shelf < tenant.shelves.size(); ++shelf) {
      on_shelves += tenant.shelves[shelf].size();
      for (const Problem* problem : tenant.shelves[shelf]) {
        require(problem->shelf == shelf, "a problem is on another shelf than it says");
        require(shelf == Tenant::kRecent || problem->live, "an unused problem is not on the shelf of those");
        require(shelf != Tenant::kBare || problem->segments->empty(), "a problem with segments is on the bare shelf");
      }
    }
    in_twins += tenant.twinned.size();
  }
  counted.sessions = all.sessions;
  require(on_shelves == all.problems, "the shelves miss problems");
  require(in_twins == with_twins, "the lists of problems with twins are off");
  const MemoryLedger::Totals booked = ledger_.totals();
  require(counted.parts[Problem::kSegments] == booked.parts[Problem::kSegments], "segment bytes are off");
  require(counted.parts[Problem::kItself] == booked.parts[Problem::kItself], "problem bytes are off");
  require(counted.parts[Problem::kLive] == booked.parts[Problem::kLive], "live bytes are off");
  require(counted.parts[Problem::kTwins] == booked.parts[Problem::kTwins], "twin bytes are off");
  require(counted.waiting_tokens == booked.waiting_tokens, "tokens that wait for a segment are off");
  require(noise_bytes() == booked.noise, "the tables of the noise are off");
  require(counted.namespaces == booked.namespaces, "namespace bytes are off");
  require(counted.sessions == booked.sessions && booked.sessions == sessions_.size(), "sessions and live texts differ");
}

}  // namespace histospec
