// What an engine holds, and the operations that keep its books. All of it is guarded by one lock.
//
// The lock is held for a few milliseconds at most, whatever is asked for: long work is done in slices, others have
// their turn between two of them (`breathe`), and what is thrown away under the lock is destroyed after it. Two threads
// belong to the engine: the builder turns finished responses into segments, and the housekeeper evicts, tidies live
// text and frees memory where that is more than a caller should wait for.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>

#include "draft/drafter.h"
#include "engine/problem.h"
#include "engine/prompts.h"
#include "histospec/engine.h"
#include "index/namespace_index.h"
#include "threads/fair_mutex.h"
#include "threads/workers.h"

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
  Problems problems;
  std::list<Problem*> members;               // the same, those first that a drop has not visited
  Prompts prompts;                           // of the problems
  std::vector<std::int64_t> latest_lengths;  // oldest first

  Holding held;            // by its problems and itself
  std::size_t booked = 0;  // of its bytes(), in the books
  bool emptied = false;    // dropped, and nothing has come since: it goes with its last session
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
  DraftContext view;
  Draft draft;             // that is being verified now
  std::uint64_t step = 0;  // the last one that it was in
};

class Engine::State {
 public:
  explicit State(EngineOptions options);
  ~State();

  // Holds the lock, and measures for how long. What was discarded meanwhile is destroyed behind it.
  class Lock {
   public:
    explicit Lock(State& state) : state_(state) { lock(); }
    ~Lock() {
      if (held_) unlock();
    }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

    void lock();
    void unlock();
    bool owns_lock() const { return held_; }

   private:
    State& state_;
    bool held_ = false;
    double since_ = 0;  // seconds of this thread's CPU
  };

  std::shared_ptr<Namespace> space(const std::string& name);
  const Namespace* find_space(const std::string& name) const;
  // The problem, as the most recently used one; if it is new, it is made and takes the key.
  std::shared_ptr<Problem> problem(Namespace& space, ProblemKey&& key);
  // The problem of a session: the one that is known by this key, else the one of which this is a later turn, else new.
  std::shared_ptr<Problem> problem_of(Namespace& space, ProblemKey&& key, Tokens prompt);
  const Problem* find_problem(const std::string& name, const ProblemKey& key) const;
  Session& session(SessionId id);
  const Session& session(SessionId id) const;

  // The parts of a step; announced is the last, for which other threads may have to wake.
  // The sessions that step, and in `rows_of_batch()` where they stand in the request.
  std::span<Session* const> batch_of(const StepRequest& request, std::vector<Outcome>& outcomes);
  std::span<const std::uint32_t> rows_of_batch() const { return rows_; }
  void announce(std::size_t batch) { workers_.announce(batch); }
  void append(Session& session, Tokens came);
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
  // Evicts until the budget holds or nothing is left to evict, and lets others in meanwhile.
  void make_room(Lock& lock);
  // Evicts a little, and leaves the rest to the housekeeper.
  void relieve();
  // Whether committers should wait: responses finish faster than they become segments, or the housekeeper still
  // has to evict.
  bool congested() const;
  // Lets the others who wait for the lock have it.
  void breathe(Lock& lock);
  // Forgets the history of a namespace; returns how many responses that were. Lets others in meanwhile.
  std::uint64_t drop(Lock& lock, const std::shared_ptr<Namespace>& space);
  // Forgets the finished responses of a problem; returns how many. The problem itself goes if no session runs in it.
  std::size_t forget(Problem& problem);
  std::size_t memory_bytes() const;
  // The part of it that running sessions and what has just finished need.
  std::size_t running_bytes() const;
  // Brings the books up to date with what a namespace holds beside its problems; after every change of that.
  void book(Namespace& space);
  // Takes a dropped namespace away that has no problems any more.
  void erase_if_empty(Namespace& space);

  // The builder has nothing to build, and the housekeeper nothing to do.
  bool is_idle() const { return to_build.empty() && building == 0 && untidy_.empty() && !over_; }

  void check_books() const;

  const EngineOptions options;
  std::condition_variable_any idle;
  LockTimes lock_times;
  std::unordered_map<std::string, std::shared_ptr<Namespace>> spaces;
  std::unordered_map<SessionId, std::unique_ptr<Session>> sessions;
  SessionId last_session = 0;
  std::deque<std::shared_ptr<Problem>> to_build;
  std::size_t building = 0;
  std::atomic<bool> has_evicted = false;  // some history, for want of memory
  NamespaceStats dropped;                 // what namespaces had counted that are gone

 private:
  // The problem becomes the most recently used one.
  void use(Problem& problem);
  void publish(Problem& problem, std::shared_ptr<const Segments> segments);
  void end_live(Problem& problem);
  // Destroys it once the lock is released.
  void discard(std::shared_ptr<const void> what, std::size_t bytes) noexcept;
  void destroy_discarded(Lock& lock);
  bool evict_some();
  // Tokens that may wait for their segment before committers should wait.
  std::size_t most_waiting() const;
  std::size_t evictable_bytes() const { return memory_bytes() - running_bytes(); }
  void tidy(const std::shared_ptr<Problem>& problem);
  bool tidy_some(Problem& problem, std::size_t work);
  void ask_for_segment(const std::shared_ptr<Problem>& problem);
  void press();
  void keep_house();
  void end_twins(Problem& problem);
  // Part of what a problem holds has changed: so do the books of its namespace, and `bytes`, those of the engine.
  static void rebook(const Problem& problem, std::size_t& bytes, const Holding& before, const Holding& after);
  void erase(Problem& problem);
  void erase(Namespace& space);
  void build_loop();
  void build(Lock& lock, Problem& problem);

  FairMutex mutex_;
  std::list<Problem*> recency_;  // least recently used first
  std::list<Problem*> twinned_;  // those that have twins, in the same order
  std::size_t segment_bytes_ = 0;
  std::size_t merging_bytes_ = 0;
  std::size_t space_bytes_ = 0;
  std::size_t problem_bytes_ = 0;
  std::size_t twin_bytes_ = 0;
  std::size_t live_bytes_ = 0;
  std::size_t waiting_tokens_ = 0;               // finished, and not yet in a segment
  std::unordered_set<Problem*> lingering_;       // those with such tokens for which the builder was not asked
  std::deque<std::shared_ptr<Problem>> untidy_;  // with text that is forgotten and still linked
  std::size_t exhausted_at_ = 0;                 // evictable bytes when nothing could be evicted; until there are more
  bool over_ = false;                            // the housekeeper has to evict
  std::vector<std::shared_ptr<const void>> discarded_;
  std::size_t discarded_bytes_ = 0;
  std::uint64_t drops_ = 0;
  std::uint64_t step_ = 0;
  std::vector<Session*> batch_;       // of this step
  std::vector<std::uint32_t> rows_;   // of the batch in the request
  std::vector<std::uint32_t> order_;  // of the batch, by what is asked: numbers of its sessions
  std::vector<DraftContext> ahead_;   // of each worker: moves along the draft that it makes; keeps its memory
  Workers workers_;
  bool stopping_ = false;
  std::condition_variable_any work_;
  std::condition_variable_any house_;
  std::thread builder_;  // last: these use all of the above
  std::thread housekeeper_;
};

template <typename Change>
auto Engine::State::change_live(Problem& problem, Change change) {
  struct Books {
    State& state;
    Problem& problem;
    const Holding before = problem.in_live();
    ~Books() {
      const Holding after = problem.in_live();
      rebook(problem, state.live_bytes_, before, after);
      state.waiting_tokens_ += after.tokens - before.tokens;
    }
  } books{*this, problem};
  if (!problem.live) problem.live = std::make_unique<LiveText>();
  return change(*problem.live);
}

}  // namespace histospec
