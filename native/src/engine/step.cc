// A step: every session appends what it generated, the estimators learn from it, and every session drafts.
#include <algorithm>
#include <numeric>

#include "engine/checks.h"
#include "engine/state.h"

namespace histospec {

static_assert(kSourceNames.size() == kTwin + 1 && kAgeNames.size() == kOldest + 1);

namespace {

// The session is about to be looked at: until then its memory can arrive.
void fetch(const Session& session) {
  constexpr std::size_t kLine = 64;
  const auto* memory = reinterpret_cast<const std::byte*>(&session);
  for (std::size_t at = 0; at < sizeof(Session); at += kLine) __builtin_prefetch(memory + at);
}

// Counts tokens by where they come from.
void count(NamespaceStats& counters, std::span<const Origin> tokens, std::uint64_t SourceStats::* what) {
  for (const Origin& token : tokens) {
    ++(counters.sources[token.source].*what);
    if (token.source == kHistory) ++(counters.ages[token.age].*what);
  }
}

void check_step(const StepRequest& r) {
  const std::size_t batch = r.sessions.size();
  if (r.offsets.size() != batch + 1) {
    throw std::invalid_argument("new_offsets: has " + std::to_string(r.offsets.size()) + " entries, must have " +
                                std::to_string(batch + 1) + " (one more than sessions)");
  }
  if (r.offsets[0] != 0 || r.offsets[batch] != static_cast<std::int64_t>(r.tokens.size()) ||
      !std::ranges::is_sorted(r.offsets)) {
    throw std::invalid_argument("new_offsets: must ascend from 0 to the number of new_tokens, " +
                                std::to_string(r.tokens.size()));
  }
  if (!r.positions.empty() && r.positions.size() != batch) {
    throw std::invalid_argument("positions: has " + std::to_string(r.positions.size()) + " entries, must have " +
                                std::to_string(batch) + " (one a session)");
  }
  if (r.max_tokens < 0 || r.max_tokens > kMaxDraft) {
    throw std::invalid_argument("max_tokens: is " + std::to_string(r.max_tokens) + ", must lie in [0, " +
                                std::to_string(kMaxDraft) + "]");
  }
  if (r.most_tokens && r.positions.empty() && batch > 0) {
    throw std::invalid_argument("positions: must be given with most_tokens");
  }
  if (r.most_tokens && *r.most_tokens < 0) {
    throw std::invalid_argument("most_tokens: is " + std::to_string(*r.most_tokens) + ", must be at least 0");
  }
  if (!(r.verify_cost >= 0)) throw std::invalid_argument("verify_cost: must be a number of at least 0");
  require_tokens("new_tokens", r.tokens);
}

// Whether the session in row b of a request can step; null: it is not open.
Outcome outcome_of(const StepRequest& request, std::size_t b, const Session* session) {
  const std::int64_t position = request.positions[b], came = request.offsets[b + 1] - request.offsets[b];
  if (position > *request.most_tokens - came) return Outcome::kTooLong;
  return session && position <= session->view.generated ? Outcome::kStepped : Outcome::kUnknown;
}

}  // namespace

// The sessions of the request, checked. They are good until the lock is released.
std::span<Session* const> Engine::State::batch_of(const StepRequest& request, std::vector<Outcome>& outcomes) {
  batch_.clear();
  rows_.clear();
  outcomes.clear();
  ++step_;
  for (std::size_t b = 0; b < request.sessions.size(); ++b) {
    const auto found = sessions.find(request.sessions[b]);
    Session* const known = found == sessions.end() ? nullptr : found->second.get();
    if (request.most_tokens) {
      outcomes.push_back(outcome_of(request, b, known));
      if (outcomes.back() != Outcome::kStepped) continue;
    }
    Session& session = known ? *known : this->session(request.sessions[b]);
    if (session.step == step_) {
      throw std::invalid_argument("sessions: " + std::to_string(request.sessions[b]) + " appears twice");
    }
    session.step = step_;
    const std::int64_t held = session.view.generated;
    if (!request.positions.empty() && (request.positions[b] < 0 || request.positions[b] > held)) {
      throw std::invalid_argument("positions[" + std::to_string(b) + "]: is " + std::to_string(request.positions[b]) +
                                  ", but the session has " + std::to_string(held) + " generated tokens");
    }
    auto twin = session.twin.lock();  // nobody forgets it while the lock is held
    // Who was opened before its problem was read from the store looks again, until it has text of its own.
    if (!twin && held == 0 && session.name_of_twin) {
      session.twin = twin = session.problem->twin(*session.name_of_twin);
    }
    session.view.twin = twin ? Tokens(*twin) : Tokens();
    batch_.push_back(&session);
    rows_.push_back(static_cast<std::uint32_t>(b));
  }
  return batch_;
}

void Engine::State::append(Session& session, Tokens came) {
  if (came.empty()) return;
  DraftContext& view = session.view;
  NamespaceStats& counters = session.space->counters;
  const std::size_t before = session.space->estimator.bytes();
  const int accepted = learn(session.space->estimator, session.draft, came, view);
  if (session.space->estimator.bytes() != before) book(*session.space);
  counters.accepted_tokens += accepted;
  count(counters, std::span(session.draft.origins).first(accepted), &SourceStats::accepted_tokens);
  // Learned from once, even if there is no memory for the text and the same tokens come again.
  const struct Spent {
    Draft& draft;
    ~Spent() { draft.clear(); }
  } spent{session.draft};
  change_live(*session.problem, [&](LiveText& live) { live.append(session.text, came); });
  counters.generated_tokens += came.size();
  for (Token token : came) {
    if (const Token* twin = view.next_of_twin()) session.space->trust.learn(view.agreement, *twin == token);
    view.push(token);
  }
  view.history_source.advance(came.size(), spent.draft.history_trail, accepted);
  view.namespace_source.advance(came.size(), spent.draft.namespace_trail, accepted);
}

// What the sessions share is only read here, so that they may draft at the same time.
void Engine::State::draft_all(std::span<Session* const> batch, DraftLimits limits) {
  // Sessions of one problem, one after the other, find its index in the cache.
  order_.resize(batch.size());
  std::iota(order_.begin(), order_.end(), 0u);
  std::ranges::sort(order_, {}, [&](std::uint32_t b) { return std::pair(batch[b]->problem.get(), b); });
  workers_.run(batch.size(), [&](int worker, std::size_t first, std::size_t last) {
    DraftContext& ahead = ahead_[worker];
    for (std::size_t i = first; i < last; ++i) {
      if (i + 1 < last) fetch(*batch[order_[i + 1]]);
      Session& session = *batch[order_[i]];
      DraftContext& view = session.view;
      view.history_source.follow(*session.problem->segments, view.tail.tokens());
      view.namespace_source.follow(*session.space->index.segments(), view.tail.tokens());
      if (!twin_alone(view, session.space->trust)) view.catch_up();
      ahead = view;
      ahead.newest = session.space->counters.newest_epoch;
      draft(ahead, LiveSource(*session.problem->live, session.text), session.space->estimator, session.space->trust,
            limits, session.draft);
    }
  });
}

void Engine::step(const StepRequest& request, StepResult& result) {
  check_step(request);
  result.tokens.clear();
  result.probabilities.clear();
  result.offsets.assign(1, 0);
  State::Lock lock(*state_);
  const std::span<Session* const> batch = state_->batch_of(request, result.outcomes);
  const std::span<const std::uint32_t> rows = state_->rows_of_batch();
  if (request.max_tokens > 0) state_->announce(batch.size());
  // First all sessions append and teach, in order; then all draft, from the same knowledge.
  for (std::size_t i = 0; i < batch.size(); ++i) {
    const std::uint32_t b = rows[i];
    Tokens came = request.tokens.subspan(request.offsets[b], request.offsets[b + 1] - request.offsets[b]);
    if (!request.positions.empty()) {
      const auto known = static_cast<std::size_t>(batch[i]->view.generated - request.positions[b]);
      came = came.subspan(std::min(known, came.size()));
    }
    state_->append(*batch[i], came);
  }
  if (request.max_tokens > 0) state_->draft_all(batch, {request.max_tokens, request.verify_cost});
  result.offsets.reserve(request.sessions.size() + 1);
  for (std::size_t i = 0; i < batch.size(); ++i) {
    result.offsets.resize(rows[i] + 1, static_cast<std::int64_t>(result.tokens.size()));  // nothing for who is left out
    if (request.max_tokens > 0) {
      const Draft& draft = batch[i]->draft;
      NamespaceStats& counters = batch[i]->space->counters;
      ++(draft.tokens.empty() ? counters.drafts_empty : counters.drafts_hit);
      counters.draft_tokens += draft.tokens.size();
      count(counters, draft.origins, &SourceStats::draft_tokens);
      result.tokens.insert(result.tokens.end(), draft.tokens.begin(), draft.tokens.end());
      result.probabilities.insert(result.probabilities.end(), draft.probabilities.begin(), draft.probabilities.end());
    }
    result.offsets.push_back(static_cast<std::int64_t>(result.tokens.size()));
  }
  result.offsets.resize(request.sessions.size() + 1, static_cast<std::int64_t>(result.tokens.size()));
  state_->relieve();
}

}  // namespace histospec
