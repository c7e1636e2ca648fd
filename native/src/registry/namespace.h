// A namespace: its problems, what they share, and its counters.
#pragma once

#include <algorithm>
#include <cstdint>
#include <list>
#include <map>
#include <string>
#include <vector>

#include "draft/estimator.h"
#include "draft/twins.h"
#include "histospec/stats.h"
#include "index/namespace_index.h"
#include "registry/monitor.h"
#include "registry/problem.h"
#include "registry/tenant.h"

namespace histospec {

// The prompts of a namespace, to find the problem that a later turn belongs to, and prompts with several problem ids.
// The prompt of a later turn consists of an earlier prompt, the response to it, and the environment's answer.
//
// Every prompt is kept as a hash of all its tokens. One pass over a prompt yields the hashes of all its prefixes, and
// those with the length of a known prompt are looked up. The longest of them are examined; the tokens are compared
// last.
//
// Cost. A namespace may know a prefix of every length. Therefore the lock is released after each slice of work, and
// only the kExamined longest known prefixes are examined.
class Prompts {
 public:
  void add(Problem& problem) REQUIRES(engine_lock);
  void remove(const Problem& problem);

  // The problem with the longest prompt that is a proper prefix of `prompt` and has a response that goes on like it;
  // null if there is none. Releases the lock after each slice of work, but not after the problem is found. Problems
  // with an explicit id are ignored.
  Problem* continued_by(Tokens prompt, Monitor::Lock& lock) const REQUIRES(engine_lock);
  // Whether another problem has the prompt that this one began with, and finished responses: with another id, or with
  // one where this has none, or without. It may miss one: of the problems with ids it looks at one for each prompt.
  bool known_elsewhere(const Problem& problem) const REQUIRES(engine_lock);

 private:
  static constexpr std::size_t kExamined = 64;
  // Work in hashed tokens: a slice, which takes some tenths of a millisecond, a lookup, and a prefix that is examined.
  static constexpr std::size_t kSlice = 1 << 14;
  static constexpr std::size_t kLookupWork = 32;
  static constexpr std::size_t kExaminedWork = 512;

  std::multimap<std::uint64_t, Problem*> by_hash_;  // of problems without an id
  // Of each prompt, one problem with an id: the oldest with finished responses, else the newest.
  std::map<std::uint64_t, const Problem*> named_;
  std::map<std::size_t, std::size_t> lengths_;  // length of a prompt -> how many prompts have it
};

struct Namespace {
  // How many of the latest lengths predict the lengths of a problem without responses.
  static constexpr std::size_t kLatestLengths = 256;

  Namespace(std::string its_name, std::size_t index_tokens, Tenant& its_tenant)
      : name(std::move(its_name)), tenant(its_tenant), index(index_tokens) {
    latest_lengths.reserve(kLatestLengths);
  }

  const std::string name;
  Tenant& tenant;
  Estimator estimator GUARDED_BY(engine_lock);
  TwinTrust trust GUARDED_BY(engine_lock);
  NamespaceIndex index;                             // guarded, except merge()
  bool merging GUARDED_BY(engine_lock) = false;     // whether a thread merges its index
  NamespaceStats counters GUARDED_BY(engine_lock);  // counters alone; the ledger has the numbers of what is held
  Problems problems GUARDED_BY(engine_lock);
  std::list<Problem*> members GUARDED_BY(engine_lock);  // the same; those that a drop has not visited come first
  Prompts prompts GUARDED_BY(engine_lock);              // of the problems
  std::vector<std::int64_t> latest_lengths GUARDED_BY(engine_lock);  // oldest first
  bool emptied GUARDED_BY(engine_lock) = false;  // dropped, with no response since: erased with its last session

  // Fields of the ledger.
  Holding held GUARDED_BY(engine_lock);            // of its problems and itself
  std::size_t booked GUARDED_BY(engine_lock) = 0;  // its bytes() as booked in `held`
  bool gone GUARDED_BY(engine_lock) = false;       // erased, though another thread may still refer to it

  std::size_t bytes() const REQUIRES(engine_lock);
  // `stored`: the response is older than those seen before.
  void saw_response(std::size_t tokens, std::int64_t epoch, bool stored = false) REQUIRES(engine_lock);
  // Forgets everything learned from its problems, but keeps the counters.
  void forget() REQUIRES(engine_lock);
};

}  // namespace histospec
