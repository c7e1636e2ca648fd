#include "histospec/engine.h"

#include <algorithm>
#include <cmath>

#include "engine/state.h"

namespace histospec {
namespace {

// Throws std::invalid_argument if these are no alternatives of a response with this many tokens.
void require_alternatives(const std::string& field, std::span<const std::uint8_t> alternatives, std::size_t tokens) {
  const std::string fault = PackedAlternatives::fault(alternatives, tokens);
  if (!fault.empty()) throw std::invalid_argument(field + ": " + fault);
}

ProblemKey checked_key(const std::string& name, Tokens prompt, const std::string& id) {
  if (name.empty()) throw std::invalid_argument("namespace: must not be empty");
  if (prompt.empty()) throw std::invalid_argument("prompt: must not be empty");
  require_tokens("prompt", prompt);
  return {id, prompt};
}

// Lengths in tokens, ascending, of the problem's responses that are longer than `generated`; if there are none, of the
// `latest` lengths of its namespace that are longer.
std::vector<std::int64_t> longer_responses(const Problem* problem, std::span<const std::int64_t> latest,
                                           std::int64_t generated) REQUIRES(engine_lock) {
  std::vector<std::int64_t> lengths;
  const auto saw = [&](std::int64_t length) {
    if (length > generated) lengths.push_back(length);
  };
  if (problem) {
    for (const auto& segment : *problem->segments) {
      for (const auto& extent : segment->extents()) saw(extent.end - extent.start);
    }
    if (problem->live) {
      for (const ResponseView& r : problem->live->finished()) saw(static_cast<std::int64_t>(r.tokens.size()));
    }
  }
  if (lengths.empty()) std::ranges::for_each(latest, saw);
  std::ranges::sort(lengths);
  return lengths;
}

// The q-quantile of at least one ascending value, linear between neighbours.
double quantile(std::span<const std::int64_t> ascending, double q) {
  const double rank = q * static_cast<double>(ascending.size() - 1);
  const auto low = static_cast<std::size_t>(std::floor(rank));
  const auto a = static_cast<double>(ascending[low]);
  const auto b = static_cast<double>(ascending[std::min(low + 1, ascending.size() - 1)]);
  return a + (b - a) * (rank - static_cast<double>(low));
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
                    const std::string& id, Arrival arrival) {
  const bool stored = arrival != Arrival::kNew;
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
    require_alternatives("alternatives[" + std::to_string(i) + "]", responses[i].alternatives,
                         responses[i].tokens.size());
    if (responses[i].tokens.empty()) continue;
    views.push_back(responses[i]);
    views.back().head = prompt;
    twins.push_back(Twins::of(views.back()));
  }
  if (views.empty()) return;
  Monitor::Lock lock(state_->monitor);
  std::shared_ptr<Namespace> namespace_;
  std::shared_ptr<Problem> problem;
  while (true) {  // looks both up each time: they may have been dropped while the lock was released
    namespace_ = state_->registry.namespace_named(name);
    problem = state_->registry.problem(*namespace_, std::move(key), arrival != Arrival::kAhead);
    if (state_->merger.add(lock, *problem, views, stored)) break;
    key = ProblemKey(id, prompt);
  }
  for (const ResponseView& r : views) namespace_->saw_response(r.tokens.size(), r.epoch, stored);
  for (std::size_t n = 0; n < views.size(); ++n) {
    const std::size_t i = stored ? views.size() - 1 - n : n;  // the newest response of a seed stays its twin
    if (!twins[i]) continue;
    state_->contents.add_twin(*problem, {*views[i].seed, prompt.size()}, views[i].epoch, std::move(twins[i]), arrival);
  }
  if (stored) {
    if (problem->shares(views.back().epoch, views.size())) state_->merger.show_stored(lock, namespace_, views);
  } else {
    state_->merger.show(lock, namespace_, *problem, views);
  }
  state_->evictor.make_room(lock);
}

Opened Engine::open(const std::string& name, Tokens prompt, const std::string& id, Tokens generated,
                    std::optional<std::int64_t> seed, bool position_noise) {
  ProblemKey key = checked_key(name, prompt, id);
  require_tokens("generated", generated);
  // All that needs no lock comes before it.
  LiveText::Buffers buffers = LiveText::buffers_for(prompt, key.prompt_hash);
  auto session = std::make_unique<Session>();
  DraftContext& context = session->context;
  for (Token token : tail(prompt)) context.tail.push(token);
  if (seed) {
    session->name_of_twin = {*seed, prompt.size()};
    session->position_noise = position_noise;
  }
  if (seed && !position_noise) {
    session->noise.emplace();
    for (Token token : prompt) session->noise->push(token);
    for (Token token : generated) session->noise->push(token);
  }
  Monitor::Lock lock(state_->monitor);
  Contents& contents = state_->contents;
  std::shared_ptr<Namespace> namespace_;
  std::shared_ptr<Problem> problem;
  while (!problem) {  // again if the namespace was erased while the lock was released
    namespace_ = state_->registry.namespace_named(name);
    problem = state_->registry.problem_of(*namespace_, key, prompt, lock);
  }
  session->namespace_ = namespace_;
  session->problem = problem;
  const auto twin = seed ? problem->twin(*session->name_of_twin) : nullptr;
  session->twin = twin;
  Opened opened = {0, id.empty() ? problem->key.prompt.size() : prompt.size(), false};
  std::optional<LiveText::TextId> text;
  try {
    contents.change_live(*problem, [&](LiveText& live) { text = live.open(prompt, std::move(buffers)); });
    // Other threads may take the lock while a long text is indexed; the text stays because it is open.
    while (contents.change_live(*problem, [&](LiveText& live) { return live.index_some(*text); })) {
      Monitor::breathe(lock);
    }
    for (std::size_t at = 0; at < generated.size(); at += LiveText::kSlice) {
      if (at > 0) Monitor::breathe(lock);
      const Tokens some = generated.subspan(at, std::min(LiveText::kSlice, generated.size() - at));
      contents.change_live(*problem, [&](LiveText& live) { live.append(*text, some); });
    }
    session->text = *text;
    for (Token token : generated) context.push(token, twin ? Tokens(*twin) : Tokens());
    context.history_source.reset(*problem->segments, context.tail.tokens());
    context.namespace_source.reset(*namespace_->index.segments(), context.tail.tokens());
    const std::size_t noise = session->noise_bytes();
    opened.id = state_->registry.add(std::move(session));
    state_->ledger.change_noise(0, noise);
  } catch (...) {  // std::bad_alloc
    if (text) contents.change_live(*problem, [&](LiveText& live) { live.drop(*text); });
    state_->builder.schedule(problem);
    throw;
  }
  opened.known = problem->known();
  NamespaceStats& counters = namespace_->counters;
  ++(opened.known ? counters.lookups_hit : counters.lookups_miss);
  if (!opened.known && namespace_->prompts.known_elsewhere(*problem)) ++counters.misnamed_lookups;
  if (seed) ++(twin ? counters.twins_hit : counters.twins_miss);
  state_->evictor.relieve();
  return opened;
}

std::optional<std::vector<Token>> Engine::close(SessionId id, bool commit, std::optional<std::int64_t> epoch,
                                                std::span<const std::uint8_t> alternatives,
                                                std::optional<std::size_t> expected_length) {
  std::vector<std::uint8_t> kept(alternatives.begin(), alternatives.end());  // before the lock
  std::optional<std::vector<Token>> said;
  Monitor::Lock lock(state_->monitor);
  if (expected_length && !state_->registry.find_session(id)) return said;
  Session& session = state_->registry.session(id);
  const std::shared_ptr<Problem> problem = session.problem;
  const std::int64_t version = epoch.value_or(session.namespace_->counters.newest_epoch);
  const Tokens tokens = problem->live->generated(session.text);
  if (expected_length == tokens.size()) said.emplace(tokens.begin(), tokens.end());
  commit = commit && (said || !expected_length);
  if (commit) require_alternatives("alternatives", alternatives, tokens.size());
  const std::optional<Twins::Key> name = session.name_of_twin;
  auto twin = commit && name ? Twins::of({{}, tokens, {}, version, name->seed}) : nullptr;
  if (commit && !tokens.empty()) session.namespace_->saw_response(tokens.size(), version);
  state_->contents.change_live(*problem, [&](LiveText& live) {
    if (commit && !tokens.empty()) {
      live.finish(session.text, version, std::move(kept));
    } else {
      live.drop(session.text);
    }
  });
  state_->ledger.change_noise(session.noise_bytes(), 0);
  state_->registry.remove(id);
  if (twin) {
    state_->contents.add_twin(*problem, *name, version, std::move(twin));
    state_->evictor.relieve();
  }
  state_->builder.schedule(problem);
  return said;
}

void Engine::step(const StepRequest& request, StepResult& result) {
  check_step(request);
  Monitor::Lock lock(state_->monitor);
  state_->steps.run(request, result);
  state_->evictor.relieve();
}

std::vector<std::int64_t> Engine::lengths(std::span<const SessionId> sessions) const {
  Monitor::Lock lock(state_->monitor);
  std::vector<std::int64_t> lengths;
  lengths.reserve(sessions.size());
  for (SessionId id : sessions) {
    const Session* session = state_->registry.find_session(id);
    lengths.push_back(session ? session->context.generated : -1);
  }
  return lengths;
}

std::vector<Token> Engine::generated(SessionId id) const {
  Monitor::Lock lock(state_->monitor);
  const Session& session = state_->registry.session(id);
  const Tokens tokens = session.problem->live->generated(session.text);
  return {tokens.begin(), tokens.end()};
}

std::vector<Response> Engine::history(const std::string& name, Tokens prompt, const std::string& id) const {
  const ProblemKey key = checked_key(name, prompt, id);
  std::vector<Response> newest, all;
  std::shared_ptr<const Segments> segments;
  {
    Monitor::Lock lock(state_->monitor);
    const Problem* problem = state_->registry.find_problem(name, key);
    if (!problem) return {};
    if (problem->live) {
      for (const ResponseView& r : problem->live->finished()) newest.push_back(owned(r));
    }
    segments = problem->segments;
  }
  for (const auto& segment : *segments) std::ranges::move(segment->responses(), std::back_inserter(all));
  std::ranges::move(newest, std::back_inserter(all));
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
    Monitor::Lock lock(state_->monitor);
    const auto namespace_ = state_->registry.find_namespace(name);
    if (namespace_) {
      const Problem* problem = state_->registry.find_problem(name, key);
      lengths = longer_responses(problem, namespace_->latest_lengths, generated);
    }
  }
  LengthPrediction out;
  out.observations = lengths.size();
  if (lengths.empty()) return out;
  for (double q : quantiles) out.lengths.push_back(quantile(lengths, q));
  return out;
}

bool Engine::knows(const std::string& name, Tokens prompt, const std::string& id) const {
  const ProblemKey key = checked_key(name, prompt, id);
  Monitor::Lock lock(state_->monitor);
  const Problem* problem = state_->registry.find_problem(name, key);
  return problem && problem->known();
}

std::string Engine::estimator(const std::string& name) const {
  Monitor::Lock lock(state_->monitor);
  const auto namespace_ = state_->registry.find_namespace(name);
  return namespace_ ? namespace_->estimator.state() : std::string();
}

void Engine::restore_estimator(const std::string& name, std::string_view state) {
  if (name.empty()) throw std::invalid_argument("namespace: must not be empty");
  Estimator restored;
  restored.restore(state);
  Monitor::Lock lock(state_->monitor);
  Namespace& namespace_ = *state_->registry.namespace_named(name);
  namespace_.estimator = std::move(restored);
  state_->ledger.update(namespace_);
}

std::uint64_t Engine::drop_namespace(const std::string& name, bool keep_learned) {
  Monitor::Lock lock(state_->monitor);
  const std::shared_ptr<Namespace> namespace_ = state_->registry.find_namespace(name);
  if (!namespace_) return 0;
  std::uint64_t responses = 0;
  std::size_t work = 0;
  const std::uint64_t drop = state_->registry.next_drop();
  while (Problem* problem = state_->registry.next_to_drop(*namespace_, drop)) {
    work += Contents::work_to_forget(*problem);
    responses += state_->contents.forget(*problem);
    if (work < Contents::kForgetSlice) continue;
    work = 0;
    Monitor::breathe(lock);
  }
  if (keep_learned) {
    namespace_->index.clear();
    namespace_->latest_lengths.clear();
  } else {
    namespace_->forget();
  }
  namespace_->counters.newest_epoch = 0;
  namespace_->emptied = !keep_learned;
  state_->ledger.update(*namespace_);
  state_->registry.erase_if_empty(*namespace_);
  return responses;
}

void Engine::assign(const std::string& name, const std::string& tenant) {
  Monitor::Lock lock(state_->monitor);
  state_->registry.assign(name, tenant);
}

void Engine::limit_tenant(const std::string& tenant, std::size_t bytes) {
  Monitor::Lock lock(state_->monitor);
  state_->registry.tenants()[tenant].most = bytes;
  state_->evictor.relieve();
}

std::map<std::string, std::size_t> Engine::tenants() const {
  Monitor::Lock lock(state_->monitor);
  std::map<std::string, std::size_t> held;
  for (const auto& [name, tenant] : state_->registry.tenants()) held[name] = tenant.bytes;
  return held;
}

bool Engine::congested() const {
  Monitor::Lock lock(state_->monitor);
  return state_->evictor.behind() || state_->builder.behind();
}

bool Engine::evicted() const { return state_->evictor.has_evicted(); }

void Engine::wait_until_built() {
  Monitor::Lock lock(state_->monitor);
  state_->monitor.idle.wait(
      lock, [this]() REQUIRES(engine_lock) { return state_->builder.idle() && state_->housekeeper.idle(); });
}

std::size_t Engine::memory_bytes() const {
  Monitor::Lock lock(state_->monitor);
  return state_->ledger.memory_bytes();
}

std::size_t Engine::memory_budget() const { return state_->budget; }

std::size_t Engine::running_bytes() const { return state_->ledger.running_bytes(); }

std::map<std::string, NamespaceStats> Engine::stats() const {
  const auto namespaces = counters().namespaces;
  return {namespaces.begin(), namespaces.end()};
}

Counters Engine::counters() const {
  Monitor::Lock lock(state_->monitor);
  Counters out;
  out.dropped = state_->registry.erased_counters();
  out.namespaces.reserve(state_->registry.namespaces().size());
  for (const auto& [name, namespace_] : state_->registry.namespaces()) {
    NamespaceStats& stats = out.namespaces.emplace_back(name, namespace_->counters).second;
    stats.bytes = namespace_->held.bytes;
    stats.problems = namespace_->held.problems;
    stats.sessions = namespace_->held.sessions;
    stats.history_responses = namespace_->held.responses;
    stats.history_tokens = namespace_->held.tokens;
  }
  return out;
}

LockTimes Engine::lock_times() const {
  Monitor::Lock lock(state_->monitor);
  return state_->monitor.times();
}

void Engine::check_integrity() const {
  Monitor::Lock lock(state_->monitor);
  state_->registry.check_integrity();
}

}  // namespace histospec
