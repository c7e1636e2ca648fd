#include "histospec/engine.h"

#include <algorithm>

#include "engine/checks.h"
#include "engine/lengths.h"
#include "engine/state.h"

namespace histospec {
namespace {

ProblemKey checked_key(const std::string& name, Tokens prompt, const std::string& id) {
  if (name.empty()) throw std::invalid_argument("namespace: must not be empty");
  if (prompt.empty()) throw std::invalid_argument("prompt: must not be empty");
  require_tokens("prompt", prompt);
  return {id, prompt};
}

}  // namespace

Engine::Engine(EngineOptions options) {
  if (options.memory_bytes == 0) throw std::invalid_argument("memory_bytes: must be positive");
  if (options.history_epochs < 1) throw std::invalid_argument("history_epochs: must be at least 1");
  if (options.history_responses < 1) throw std::invalid_argument("history_responses: must be at least 1");
  if (options.threads < 1 || options.threads > kMaxThreads) {
    throw std::invalid_argument("threads: is " + std::to_string(options.threads) + ", must lie in [1, " +
                                std::to_string(kMaxThreads) + "]");
  }
  state_ = std::make_unique<State>(options);
}

Engine::~Engine() = default;

void Engine::ingest(const std::string& name, Tokens prompt, std::span<const ResponseView> responses,
                    const std::string& id) {
  ProblemKey key = checked_key(name, prompt, id);
  std::vector<ResponseView> views;
  std::vector<std::shared_ptr<const Twin>> twins;  // one a view, or null
  for (std::size_t i = 0; i < responses.size(); ++i) {
    const std::string field = "responses[" + std::to_string(i) + "]";
    require_tokens(field, responses[i].tokens);
    if (!responses[i].generated.empty() && responses[i].generated.size() != responses[i].tokens.size()) {
      throw std::invalid_argument(field + ": its mask has " + std::to_string(responses[i].generated.size()) +
                                  " entries for " + std::to_string(responses[i].tokens.size()) + " tokens");
    }
    if (responses[i].tokens.empty()) continue;
    views.push_back(responses[i]);
    views.back().head = prompt;
    twins.push_back(Twins::of(views.back()));
  }
  if (views.empty()) return;
  std::shared_ptr<const Segment> fresh = Segment::build(views);
  State::Lock lock(*state_);
  std::shared_ptr<Namespace> space;
  std::shared_ptr<Problem> problem;
  while (true) {  // both anew each time: they may have been dropped while the lock was released
    space = state_->space(name);
    problem = state_->problem(*space, std::move(key));
    if (state_->add_segment(lock, *problem, fresh)) break;
    key = ProblemKey(id, prompt);
  }
  for (const ResponseView& r : views) space->saw_response(r.tokens.size(), r.epoch);
  for (std::size_t i = 0; i < views.size(); ++i) {
    if (twins[i]) state_->add_twin(*problem, {*views[i].seed, prompt.size()}, views[i].epoch, std::move(twins[i]));
  }
  if (problem->shares(views.front().epoch, views.size())) state_->share(lock, space, views.front());
  state_->make_room(lock);
}

SessionId Engine::open(const std::string& name, Tokens prompt, const std::string& id, Tokens generated,
                       std::optional<std::int64_t> seed) {
  ProblemKey key = checked_key(name, prompt, id);
  require_tokens("generated", generated);
  LiveText::Buffers buffers = LiveText::buffers_for(prompt);
  State::Lock lock(*state_);
  auto session = std::make_unique<Session>();
  session->space = state_->space(name);
  const std::shared_ptr<Problem> problem = session->problem =
      state_->problem_of(*session->space, std::move(key), prompt);
  session->prompt_length = id.empty() ? problem->key.prompt.size() : prompt.size();
  std::shared_ptr<const Twin> twin;
  if (seed) {
    session->name_of_twin = {*seed, prompt.size()};
    session->twin = twin = problem->twin(*session->name_of_twin);
    if (twin) session->view.twin = *twin;
  }
  NamespaceStats& counters = session->space->counters;
  std::optional<LiveText::TextId> text;
  SessionId number = 0;
  try {
    state_->change_live(*problem, [&](LiveText& live) { text = live.open(prompt, std::move(buffers)); });
    // Others have their turn while a long text is made searchable; being open, it stays where it is.
    while (state_->change_live(*problem, [&](LiveText& live) { return live.index_some(*text); })) {
      state_->breathe(lock);
    }
    for (std::size_t at = 0; at < generated.size(); at += LiveText::kSlice) {
      if (at > 0) state_->breathe(lock);
      const Tokens some = generated.subspan(at, std::min(LiveText::kSlice, generated.size() - at));
      state_->change_live(*problem, [&](LiveText& live) { live.append(*text, some); });
    }
    session->text = *text;
    for (Token token : tail(prompt)) session->view.tail.push(token);
    for (Token token : generated) session->view.push(token);
    session->view.history_source.reset(*problem->segments, session->view.tail.tokens());
    session->view.namespace_source.reset(*session->space->index.segments(), session->view.tail.tokens());
    number = state_->last_session + 1;
    state_->sessions.emplace(number, std::move(session));
  } catch (...) {  // out of memory
    if (text) state_->change_live(*problem, [&](LiveText& live) { live.drop(*text); });
    state_->schedule(problem);
    throw;
  }
  state_->last_session = number;
  ++(problem->known() ? counters.lookups_hit : counters.lookups_miss);
  if (seed) ++(twin ? counters.twins_hit : counters.twins_miss);
  state_->relieve();
  return number;
}

void Engine::close(SessionId id, bool commit, std::optional<std::int64_t> epoch) {
  State::Lock lock(*state_);
  Session& session = state_->session(id);
  const std::shared_ptr<Problem> problem = session.problem;
  const std::int64_t version = epoch.value_or(session.space->counters.newest_epoch);
  const Tokens said = problem->live->generated(session.text);
  const std::optional<Twins::Key> name = session.name_of_twin;
  auto twin = commit && name ? Twins::of({{}, said, {}, version, name->seed}) : nullptr;
  state_->change_live(*problem, [&](LiveText& live) {
    if (commit && !said.empty()) {
      session.space->saw_response(said.size(), version);
      live.finish(session.text, version);
    } else {
      live.drop(session.text);
    }
  });
  state_->sessions.erase(id);
  if (twin) {
    state_->add_twin(*problem, *name, version, std::move(twin));
    state_->relieve();
  }
  state_->schedule(problem);
}

std::vector<std::int64_t> Engine::lengths(std::span<const SessionId> sessions) const {
  State::Lock lock(*state_);
  std::vector<std::int64_t> lengths;
  lengths.reserve(sessions.size());
  for (SessionId id : sessions) {
    const auto found = state_->sessions.find(id);
    lengths.push_back(found == state_->sessions.end() ? -1 : found->second->view.generated);
  }
  return lengths;
}

std::size_t Engine::prompt_length(SessionId id) const {
  State::Lock lock(*state_);
  return std::as_const(*state_).session(id).prompt_length;
}

std::vector<Token> Engine::generated(SessionId id) const {
  State::Lock lock(*state_);
  const Session& session = std::as_const(*state_).session(id);
  const Tokens tokens = session.problem->live->generated(session.text);
  return {tokens.begin(), tokens.end()};
}

std::vector<Response> Engine::history(const std::string& name, Tokens prompt, const std::string& id) const {
  const ProblemKey key = checked_key(name, prompt, id);
  State::Lock lock(*state_);
  std::vector<Response> out;
  const Problem* problem = state_->find_problem(name, key);
  if (!problem) return out;
  if (problem->live) {
    for (const ResponseView& r : problem->live->finished()) {
      out.push_back(owned(r));
    }
  }
  const std::shared_ptr<const Segments> segments = problem->segments;
  lock.unlock();
  std::vector<Response> all;
  for (const auto& segment : *segments) std::ranges::move(segment->responses(), std::back_inserter(all));
  std::ranges::move(out, std::back_inserter(all));
  return all;
}

LengthPrediction Engine::predict_length(const std::string& name, Tokens prompt, std::int64_t generated,
                                        std::span<const double> quantiles, const std::string& id) const {
  const ProblemKey key = checked_key(name, prompt, id);
  for (double q : quantiles) {
    if (!(q >= 0 && q <= 1)) throw std::invalid_argument("quantiles: each must lie in [0, 1]");
  }
  std::vector<std::int64_t> lengths;
  {
    State::Lock lock(*state_);
    const Namespace* space = state_->find_space(name);
    if (space) lengths = longer_responses(state_->find_problem(name, key), space->latest_lengths, generated);
  }
  LengthPrediction out;
  out.observations = lengths.size();
  if (lengths.empty()) return out;
  for (double q : quantiles) out.lengths.push_back(quantile(lengths, q));
  return out;
}

bool Engine::knows(const std::string& name, Tokens prompt, const std::string& id) const {
  const ProblemKey key = checked_key(name, prompt, id);
  State::Lock lock(*state_);
  const Problem* problem = state_->find_problem(name, key);
  return problem && problem->known();
}

std::int64_t Engine::newest_epoch(const std::string& name) const {
  State::Lock lock(*state_);
  const Namespace* space = state_->find_space(name);
  return space ? space->counters.newest_epoch : 0;
}

std::string Engine::estimator(const std::string& name) const {
  State::Lock lock(*state_);
  const Namespace* space = state_->find_space(name);
  return space ? space->estimator.state() : std::string();
}

void Engine::restore_estimator(const std::string& name, std::string_view state) {
  if (name.empty()) throw std::invalid_argument("namespace: must not be empty");
  Estimator restored;
  restored.restore(state);
  State::Lock lock(*state_);
  Namespace& space = *state_->space(name);
  space.estimator = std::move(restored);
  state_->book(space);
}

std::uint64_t Engine::drop_namespace(const std::string& name, bool keep_learned) {
  State::Lock lock(*state_);
  const auto found = state_->spaces.find(name);
  if (found == state_->spaces.end()) return 0;
  const std::shared_ptr<Namespace> space = found->second;
  const std::uint64_t responses = state_->drop(lock, space);
  if (keep_learned) {
    space->index.clear();
    space->latest_lengths.clear();
  } else {
    space->forget();
  }
  space->counters.newest_epoch = 0;
  space->emptied = !keep_learned;
  state_->book(*space);
  state_->erase_if_empty(*space);
  return responses;
}

bool Engine::congested() const {
  State::Lock lock(*state_);
  return state_->congested();
}

bool Engine::evicted() const { return state_->has_evicted; }

void Engine::wait_until_built() {
  State::Lock lock(*state_);
  state_->idle.wait(lock, [this] { return state_->is_idle(); });
}

std::size_t Engine::memory_bytes() const {
  State::Lock lock(*state_);
  return state_->memory_bytes();
}

std::size_t Engine::running_bytes() const {
  State::Lock lock(*state_);
  return state_->running_bytes();
}

std::map<std::string, NamespaceStats> Engine::stats() const {
  const auto namespaces = counters().namespaces;
  return {namespaces.begin(), namespaces.end()};
}

Counters Engine::counters() const {
  State::Lock lock(*state_);
  Counters out;
  out.dropped = state_->dropped;
  out.namespaces.reserve(state_->spaces.size());
  for (const auto& [name, space] : state_->spaces) {
    NamespaceStats& stats = out.namespaces.emplace_back(name, space->counters).second;
    stats.bytes = space->held.bytes;
    stats.problems = space->held.problems;
    stats.sessions = space->held.sessions;
    stats.history_responses = space->held.responses;
    stats.history_tokens = space->held.tokens;
  }
  return out;
}

LockTimes Engine::lock_times() const {
  State::Lock lock(*state_);
  return state_->lock_times;
}

void Engine::check_integrity() const {
  State::Lock lock(*state_);
  state_->check_books();
}

}  // namespace histospec
