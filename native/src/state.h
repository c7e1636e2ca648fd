// What an engine holds, and the operations that keep its books. All of it is guarded by `mutex`.
#pragma once

#include <condition_variable>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>

#include "drafter.h"
#include "fair_mutex.h"
#include "histospec/engine.h"
#include "namespace_index.h"
#include "problem.h"
#include "prompts.h"
#include "workers.h"

namespace histospec {

struct Namespace {
  // Responses whose lengths stand for a problem that has none.
  static constexpr std::size_t kLatestLengths = 256;

  Namespace(std::string its_name, std::size_t index_tokens) : name(std::move(its_name)), index(index_tokens) {
    latest_lengths.reserve(kLatestLengths);
  }

  const std::string name;
  Estimator estimator;
  TwinTrust trust;
  NamespaceIndex index;
  bool merging = false;     // its index
  NamespaceStats counters;  // what is counted; what is held stands in the books
  std::unordered_map<ProblemKey, std::shared_ptr<Problem>, ProblemKeyHash> problems;
  Prompts prompts;                           // of the problems
  std::vector<std::int64_t> latest_lengths;  // oldest first

  Holding held;            // by its problems and itself
  std::size_t booked = 0;  // of its bytes(), in the books
  bool gone = false;       // dropped, though somebody may still hold it

  std::size_t bytes() const;
  void saw_response(std::size_t tokens, std::int64_t epoch);
  // Gives up what its problems taught: all but what was counted.
  void forget();
};

struct Session {
  std::shared_ptr<Namespace> space;
  std::shared_ptr<Problem> problem;
  std::size_t prompt_length;  // how many tokens of its prompt name its problem
  LiveText::TextId text;
  std::optional<Twins::Key> name_of_twin;  // of its own response, too
  std::weak_ptr<const Twin> twin;          // not its own: what is forgotten is gone
  Viewpoint view;
  Draft draft;             // that is being verified now
  std::uint64_t step = 0;  // the last one that it was in
  bool tail = false;       // expected to go on longer than most of its batch
  double expected = 0;     // its length in the end
  std::int64_t look = 0;   // the length at which that is asked again
};

class Engine::State {
 public:
  explicit State(EngineOptions options);
  ~State();

  using Lock = std::unique_lock<FairMutex>;

  std::shared_ptr<Namespace> space(const std::string& name);
  const Namespace* find_space(const std::string& name) const;
  // The problem, made if it is new, as the most recently used one.
  std::shared_ptr<Problem> problem(Namespace& space, const ProblemKey& key);
  // The problem of a session: the one that is known by this key, else the one of which this is a later turn, else new.
  std::shared_ptr<Problem> problem_of(Namespace& space, const ProblemKey& key, Tokens prompt);
  const Problem* find_problem(const std::string& name, const ProblemKey& key) const;
  Session& session(SessionId id);
  const Session& session(SessionId id) const;

  // The parts of a step; announced is the last, for which other threads may have to wake.
  std::span<Session* const> batch_of(const StepRequest& request);
  void announce(std::size_t batch) { workers_.announce(batch); }
  void append(Session& session, Tokens came);
  void find_tail(std::span<Session* const> batch);
  void draft_all(std::span<Session* const> batch, DraftLimits limits);

  // Puts a segment behind the history of a problem; merging happens with the lock released. False, with nothing done,
  // if the history was forgotten meanwhile.
  bool add_segment(Lock& lock, Problem& problem, std::shared_ptr<const Segment> fresh);
  // Shows a response to the index of its namespace; merging happens with the lock released.
  void share(Lock& lock, std::shared_ptr<Namespace> space, const ResponseView& response);
  // Keeps the response that is named so as a twin, if there is memory for that.
  void add_twin(Problem& problem, Twins::Key key, std::int64_t epoch, std::shared_ptr<const Twin> twin);
  // Changes the live text of a problem under the books.
  template <typename Change>
  auto change_live(Problem& problem, Change change);
  // Has the builder turn what finished into a segment, where it is time to.
  void schedule(const std::shared_ptr<Problem>& problem);
  // Evicts until the budget holds or nothing is left to evict.
  void enforce_budget();
  // Forgets the finished responses of a problem; returns how many. The problem itself goes if no session runs in it.
  std::size_t forget(Problem& problem);
  std::size_t memory_bytes() const;
  // The part of it that running sessions and what has just finished need.
  std::size_t running_bytes() const;
  // Brings the books up to date with what a namespace holds beside its problems; after every change of that.
  void book(Namespace& space);
  // Takes a namespace without problems away.
  void erase(Namespace& space);

  void check_books() const;

  const EngineOptions options;
  mutable FairMutex mutex;
  std::condition_variable_any idle;
  std::unordered_map<std::string, std::shared_ptr<Namespace>> spaces;
  std::unordered_map<SessionId, std::unique_ptr<Session>> sessions;
  SessionId last_session = 0;
  std::deque<std::shared_ptr<Problem>> to_build;
  std::size_t building = 0;
  NamespaceStats dropped;  // what namespaces had counted that are gone

 private:
  void publish(Problem& problem, std::shared_ptr<const Segments> segments);
  void end_live(Problem& problem);
  void end_twins(Problem& problem);
  // Part of what a problem holds has changed: so do the books of its namespace, and `bytes`, those of the engine.
  static void rebook(const Problem& problem, std::size_t& bytes, const Holding& before, const Holding& after);
  void erase(Problem& problem);
  void build_loop();
  void build(Lock& lock, Problem& problem);
  void number_all(std::size_t batch);

  std::list<Problem*> recency_;  // least recently used first
  std::list<Problem*> twinned_;  // those that have twins, in the same order
  std::size_t segment_bytes_ = 0;
  std::size_t merging_bytes_ = 0;
  std::size_t space_bytes_ = 0;
  std::size_t problem_bytes_ = 0;
  std::size_t twin_bytes_ = 0;
  std::size_t live_bytes_ = 0;
  std::uint64_t step_ = 0;
  std::vector<Session*> batch_;       // of this step
  std::vector<std::uint32_t> order_;  // of the batch, by what is asked: numbers of its sessions
  std::vector<Viewpoint> ahead_;      // of each worker: moves along the draft that it makes; keeps its memory
  Workers workers_;
  bool stopping_ = false;
  std::condition_variable_any work_;
  std::thread builder_;  // last: it uses all of the above
};

template <typename Change>
auto Engine::State::change_live(Problem& problem, Change change) {
  struct Books {
    State& state;
    Problem& problem;
    const Holding before = problem.in_live();
    ~Books() { rebook(problem, state.live_bytes_, before, problem.in_live()); }
  } books{*this, problem};
  if (!problem.live) problem.live = std::make_unique<LiveText>();
  return change(*problem.live);
}

}  // namespace histospec
