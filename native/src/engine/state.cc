#include "engine/state.h"

#include <algorithm>
#include <stdexcept>

namespace histospec {
namespace {

// Finished responses wait for the end of their group, because one segment for all of them is cheaper to build and to
// follow than one each; but no longer than until they are so many tokens.
constexpr std::size_t kWaitingTokens = 1 << 16;

// What merging takes meanwhile, a token: copies, ranks, the suffix sort and the new rows. Room is made for it before.
constexpr std::size_t kMergingBytes = 48;

// Tokens that are copied for a segment at a time, so that copying them does not hold the lock for long.
constexpr std::size_t kBuildTokens = 1 << 18;

// A segment is merged up to so many tokens, so that merging takes at most one part in so many of the budget; never less
// than the first number.
constexpr std::size_t kLargestSegment = 1 << 18;
constexpr std::size_t kMergingPart = 32;

std::size_t largest_segment(const EngineOptions& options) {
  return std::max(kLargestSegment, options.memory_bytes / kMergingPart / kMergingBytes);
}

}  // namespace

std::size_t Namespace::bytes() const {
  return sizeof(Namespace) + estimator.bytes() + index.bytes() + latest_lengths.capacity() * sizeof(std::int64_t);
}

void Namespace::saw_response(std::size_t tokens, std::int64_t epoch) {
  if (latest_lengths.size() == kLatestLengths) latest_lengths.erase(latest_lengths.begin());
  latest_lengths.push_back(static_cast<std::int64_t>(tokens));  // never allocates
  emptied = false;
  counters.newest_epoch = std::max(counters.newest_epoch, epoch);
}

void Namespace::forget() {
  index.clear();
  estimator.reset();
  trust = TwinTrust();
  latest_lengths.clear();
}

Engine::State::State(EngineOptions o)
    : options(o), ahead_(o.threads), workers_(o.threads), builder_([this] { build_loop(); }), housekeeper_([this] {
        keep_house();
      }) {}

Engine::State::~State() {
  {
    Lock lock(*this);
    stopping_ = true;
  }
  work_.notify_all();
  house_.notify_all();
  builder_.join();
  housekeeper_.join();
}

std::shared_ptr<Namespace> Engine::State::space(const std::string& name) {
  const auto found = spaces.find(name);
  if (found != spaces.end()) return found->second;
  const auto made = spaces.emplace(name, std::make_shared<Namespace>(name, options.namespace_tokens)).first->second;
  book(*made);
  return made;
}

void Engine::State::book(Namespace& space) {
  if (space.gone) return;
  const std::size_t bytes = space.bytes();
  space_bytes_ += bytes - space.booked;
  space.held.bytes += bytes - space.booked;
  space.booked = bytes;
}

void Engine::State::erase(Namespace& space) {
  dropped.add_counted(space.counters);
  space_bytes_ -= space.booked;
  space.gone = true;
  spaces.erase(spaces.find(space.name));  // may destroy `space`
}

void Engine::State::erase_if_empty(Namespace& space) {
  if (space.emptied && space.problems.empty() && !space.gone) erase(space);
}

const Namespace* Engine::State::find_space(const std::string& name) const {
  const auto found = spaces.find(name);
  return found == spaces.end() ? nullptr : found->second.get();
}

std::shared_ptr<Problem> Engine::State::problem(Namespace& space, ProblemKey&& key) {
  const auto found = space.problems.find(key);
  if (found != space.problems.end()) {
    use(**found);
    return *found;
  }
  const auto problem = std::make_shared<Problem>(std::move(key));
  problem->owner = &space;
  problem->dropped = drops_;
  std::list<Problem*> node = {problem.get()}, member = {problem.get()};
  const auto inserted = space.problems.insert(problem).first;
  try {
    space.prompts.add(*problem);
  } catch (...) {
    space.problems.erase(inserted);
    throw;
  }
  problem->recency = node.begin();
  recency_.splice(recency_.end(), node);
  problem->member = member.begin();
  space.members.splice(space.members.end(), member);
  rebook(*problem, problem_bytes_, {}, problem->itself());
  rebook(*problem, segment_bytes_, {}, problem->in_segments());
  return problem;
}

void Engine::State::use(Problem& problem) {
  recency_.splice(recency_.end(), recency_, problem.recency);
  if (problem.twins) twinned_.splice(twinned_.end(), twinned_, problem.twinned);
}

std::shared_ptr<Problem> Engine::State::problem_of(Namespace& space, ProblemKey&& key, Tokens prompt) {
  if (key.id.empty() && !space.problems.contains(key)) {
    const auto continues = [prompt](const Problem& problem) { return problem.continued_by(prompt); };
    if (Problem* earlier = space.prompts.longest_prefix(prompt, continues)) {
      use(*earlier);
      return earlier->shared_from_this();
    }
  }
  return problem(space, std::move(key));
}

const Problem* Engine::State::find_problem(const std::string& name, const ProblemKey& key) const {
  const Namespace* space = find_space(name);
  if (!space) return nullptr;
  const auto found = space->problems.find(key);
  return found == space->problems.end() ? nullptr : found->get();
}

Session& Engine::State::session(SessionId id) { return const_cast<Session&>(std::as_const(*this).session(id)); }

const Session& Engine::State::session(SessionId id) const {
  const auto found = sessions.find(id);
  if (found == sessions.end()) throw UnknownSession("session " + std::to_string(id) + " is not open");
  return *found->second;
}

void Engine::State::publish(Problem& problem, std::shared_ptr<const Segments> segments) {
  const Holding before = problem.in_segments();
  problem.segments.swap(segments);
  rebook(problem, segment_bytes_, before, problem.in_segments());
  discard(std::move(segments), before.bytes);
}

void Engine::State::end_live(Problem& problem) {
  const Holding before = problem.in_live();
  rebook(problem, live_bytes_, before, {});
  waiting_tokens_ -= before.tokens;
  lingering_.erase(&problem);
  try {
    discard(std::shared_ptr<const LiveText>(std::move(problem.live)), before.bytes);
  } catch (const std::bad_alloc&) {
  }
  problem.live.reset();
}

void Engine::State::add_twin(Problem& problem, Twins::Key key, std::int64_t epoch, std::shared_ptr<const Twin> twin) {
  const Holding before = problem.in_twins();
  try {
    if (!problem.twins) {
      auto twins = std::make_unique<Twins>();
      twinned_.push_back(&problem);
      problem.twinned = std::prev(twinned_.end());
      problem.twins = std::move(twins);
    }
    problem.twins->add(key, epoch, std::move(twin));
  } catch (const std::bad_alloc&) {
    // The history has the response; drafts of it are only shorter.
  }
  rebook(problem, twin_bytes_, before, problem.in_twins());
}

void Engine::State::end_twins(Problem& problem) {
  if (!problem.twins) return;
  rebook(problem, twin_bytes_, problem.in_twins(), {});
  twinned_.erase(problem.twinned);
  problem.twins.reset();  // at once: sessions look at a twin for as long as it exists
}

void Engine::State::rebook(const Problem& problem, std::size_t& bytes, const Holding& before, const Holding& after) {
  bytes += after.bytes - before.bytes;
  Holding& held = problem.owner->held;
  held -= before;
  held += after;
}

bool Engine::State::add_segment(Lock& lock, Problem& problem, std::shared_ptr<const Segment> fresh) {
  const std::uint64_t generation = problem.generation;
  while (problem.generation == generation) {
    const std::shared_ptr<const Segments> before = problem.segments;
    if (before->empty()) {  // nothing to merge with
      publish(problem, std::make_shared<const Segments>(1, std::move(fresh)));
      return true;
    }
    std::size_t evicted = 0;
    lock.unlock();
    std::shared_ptr<const Segments> after =
        with_segment(*before, fresh, {options.history_epochs, options.history_responses}, evicted,
                     {.largest = largest_segment(options)});
    lock.lock();
    // Somebody else may have added a segment meanwhile: then once more, on top of theirs.
    if (problem.generation == generation && problem.segments == before) {
      publish(problem, std::move(after));
      problem.owner->counters.evicted_responses += evicted;
      return true;
    }
  }
  return false;
}

void Engine::State::share(Lock& lock, std::shared_ptr<Namespace> space, const ResponseView& response) {
  std::size_t charged = 0;
  try {
    const bool enough = space->index.add(response);
    book(*space);
    if (!enough || space->merging) return;
    const NamespaceIndex::Batch batch = space->index.take();
    book(*space);
    space->merging = true;
    merging_bytes_ += charged = kMergingBytes * batch.tokens();
    make_room(lock);
    lock.unlock();
    std::shared_ptr<const Segments> merged = space->index.merge(batch);
    lock.lock();
    space->index.publish(batch, std::move(merged));
    book(*space);
  } catch (const std::exception&) {
    // The history has the response; what the index of the namespace could not take, it does without.
    if (!lock.owns_lock()) lock.lock();
    book(*space);
  }
  if (charged == 0) return;
  merging_bytes_ -= charged;
  space->merging = false;
}

void Engine::State::schedule(const std::shared_ptr<Problem>& problem) {
  if (!problem->live) return;
  const bool over = problem->live->running() == 0;
  if (over && problem->live->finished_tokens() == 0) {  // also while the builder has what was forgotten meanwhile
    end_live(*problem);
    Namespace& space = *problem->owner;
    if (space.emptied) {
      forget(*problem);
      erase_if_empty(space);
    }
    return;
  }
  if (!problem->building) {
    if (over || problem->live->finished_tokens() >= kWaitingTokens) {
      ask_for_segment(problem);
    } else if (problem->live->finished_tokens() > 0) {
      try {
        lingering_.insert(problem.get());
      } catch (const std::bad_alloc&) {  // then it waits for the end of its group
      }
      press();
    }
  }
  if (!over) tidy(problem);
}

void Engine::State::ask_for_segment(const std::shared_ptr<Problem>& problem) {
  try {
    to_build.push_back(problem);
  } catch (const std::bad_alloc&) {  // then the next session of the problem that ends asks again
    return;
  }
  problem->building = true;
  lingering_.erase(problem.get());
  work_.notify_one();
}

// Where too much waits for the end of its group, builds segments before that.
void Engine::State::press() {
  if (2 * waiting_tokens_ <= most_waiting() || !to_build.empty()) return;
  while (!lingering_.empty()) {
    Problem& problem = **lingering_.begin();
    lingering_.erase(lingering_.begin());
    ask_for_segment(problem.shared_from_this());
  }
}

void Engine::State::build_loop() {
  Lock lock(*this);
  while (true) {
    work_.wait(lock, [this] { return stopping_ || !to_build.empty(); });
    if (stopping_) return;
    const std::shared_ptr<Problem> problem = std::move(to_build.front());
    to_build.pop_front();
    ++building;
    try {
      build(lock, *problem);
      problem->building = false;
      schedule(problem);  // what finished meanwhile, or nothing: then the live text goes
      make_room(lock);
      press();
    } catch (const std::exception&) {
      // Out of memory, or too long for a segment. What finished stays live text until the next session of the problem
      // ends.
      if (!lock.owns_lock()) lock.lock();
      problem->building = false;
    }
    --building;
    idle.notify_all();
  }
}

void Engine::State::build(Lock& lock, Problem& problem) {
  if (!problem.live) return;
  const std::uint64_t generation = problem.generation;
  const std::vector<LiveText::TextId> texts = problem.live->finished_texts(kBuildTokens);
  if (texts.empty()) return;  // forgotten before its turn
  // Copied, because the texts may move while the lock is released.
  std::vector<Response> responses;
  for (const ResponseView& r : problem.live->finished(kBuildTokens)) {
    responses.push_back(owned(r));
  }
  lock.unlock();
  std::vector<ResponseView> views;
  for (const Response& r : responses) views.push_back(r.view());
  std::shared_ptr<const Segment> fresh = Segment::build(views);
  lock.lock();
  if (problem.generation != generation || !add_segment(lock, problem, std::move(fresh))) return;
  change_live(problem, [&](LiveText& live) { live.dissolve(texts); });
  const auto space = spaces.find(problem.owner->name);
  if (space != spaces.end() && problem.shares(views.front().epoch, views.size())) {
    share(lock, space->second, views.front());
  }
}

std::size_t Engine::State::forget(Problem& problem) {
  const std::size_t responses = problem.in_segments().responses + problem.in_live().responses;
  ++problem.generation;
  publish(problem, std::make_shared<const Segments>());
  end_twins(problem);
  if (problem.live) {
    change_live(problem, [](LiveText& live) { live.dissolve(live.finished_texts()); });
    if (problem.live->running() > 0) {
      lingering_.erase(&problem);
      tidy(problem.shared_from_this());
      return responses;
    }
    end_live(problem);
  }
  erase(problem);
  return responses;
}

void Engine::State::erase(Problem& problem) {
  rebook(problem, segment_bytes_, problem.in_segments(), {});
  rebook(problem, problem_bytes_, problem.itself(), {});
  recency_.erase(problem.recency);
  problem.owner->members.erase(problem.member);
  Namespace& space = *problem.owner;
  space.prompts.remove(problem);
  space.problems.erase(space.problems.find(problem.key));  // may destroy `problem`
}

std::size_t Engine::State::memory_bytes() const {
  return segment_bytes_ + merging_bytes_ + problem_bytes_ + twin_bytes_ + space_bytes_ + running_bytes();
}

std::size_t Engine::State::running_bytes() const {
  // A position of a draft: what was estimated there, and the marks of both sources.
  constexpr std::size_t kPosition = sizeof(Prediction) + 4 * sizeof(Place) + 2 * sizeof(std::size_t);
  constexpr std::size_t kSession = sizeof(Session) + 8 * sizeof(Place) + 17 * kPosition + 256;
  return live_bytes_ + sessions.size() * kSession;
}

void Engine::State::check_books() const {
  auto require = [](bool holds, const char* invariant) {
    if (!holds) throw std::logic_error(std::string("engine: ") + invariant);
  };
  std::size_t segments = 0, problems = 0, live = 0, twins = 0, twinned = 0, booked = 0, waiting = 0;
  Holding all;
  for (const auto& [name, space] : spaces) {
    require(space->booked == space->bytes() && !space->gone, "a namespace is not what is booked of it");
    booked += space->booked;
    Holding held{.bytes = space->booked};
    for (const auto& problem : space->problems) {
      require(problem->owner == space.get() && space->problems.contains(problem->key), "a problem is filed elsewhere");
      segments += problem->in_segments().bytes;
      problems += problem->itself().bytes;
      live += problem->in_live().bytes;
      waiting += problem->in_live().tokens;
      twins += problem->in_twins().bytes;
      twinned += problem->twins != nullptr;
      for (const Holding& part : {problem->in_segments(), problem->itself(), problem->in_live(), problem->in_twins()}) {
        held += part;
      }
      if (problem->twins) problem->twins->check_integrity();
      for (const auto& segment : *problem->segments) segment->check_integrity();
    }
    require(space->members.size() == space->problems.size(), "the members of a namespace are not its problems");
    require(held == space->held, "what the problems of a namespace hold is not what is booked");
    all += held;
  }
  require(recency_.size() == all.problems, "the recency list misses problems");
  require(twinned_.size() == twinned, "the list of problems with twins is off");
  require(segments == segment_bytes_, "segment bytes are off");
  require(problems == problem_bytes_, "problem bytes are off");
  require(live == live_bytes_, "live bytes are off");
  require(waiting == waiting_tokens_, "tokens that wait for a segment are off");
  require(twins == twin_bytes_, "twin bytes are off");
  require(booked == space_bytes_, "namespace bytes are off");
  require(all.sessions == sessions.size(), "sessions and live texts differ");
}

}  // namespace histospec
