#include "engine/step.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <string>

namespace histospec {

static_assert(kSourceNames.size() == kModel + 1 && kAgeNames.size() == kOldest + 1);

namespace {

// Prefetches a session that will be used soon.
void fetch(const Session& session) {
  constexpr std::size_t kLine = 64;
  const auto* memory = reinterpret_cast<const std::byte*>(&session);
  for (std::size_t at = 0; at < sizeof(Session); at += kLine) __builtin_prefetch(memory + at);
}

// Counts tokens by source and age.
void count(NamespaceStats& counters, std::span<const Origin> tokens, std::uint64_t SourceStats::* what) {
  for (const Origin& token : tokens) {
    ++(counters.sources[token.source].*what);
    if (token.source == kHistory) ++(counters.ages[token.age].*what);
  }
}

// A worker may report any number; these bounds keep the sum from overflowing.
constexpr float kMostCost = 16;               // steps for a token; nothing is drafted from 1 on
constexpr std::size_t kMostPriced = 1 << 16;  // tokens of one session in a step

// What verifying tokens costs, in millionths of a step without drafts.
std::uint64_t microsteps(std::size_t tokens, float verify_cost) {
  const double cost = std::min(verify_cost, kMostCost);
  return static_cast<std::uint64_t>(std::llround(1e6 * cost * static_cast<double>(std::min(tokens, kMostPriced))));
}

void count_drafted(NamespaceStats& counters, std::span<const Origin> tokens) {
  counters.draft_tokens += tokens.size();
  count(counters, tokens, &SourceStats::draft_tokens);
}

// What the worker verified for one session together with its new tokens.
struct Verified {
  bool reported;          // false: the worker has no other drafter
  std::size_t server;     // verified tokens of the engine's draft, from the first on
  std::size_t model = 0;  // verified tokens of the worker's own drafter
  std::size_t model_accepted = 0;

  // Row b of a report; without a report, the whole draft of `drafted` tokens. A session that was opened anew since the
  // draft that the worker verified has no draft.
  static Verified of(const VerifiedReport& report, std::size_t b, std::size_t drafted);
};

Verified Verified::of(const VerifiedReport& report, std::size_t b, std::size_t drafted) {
  if (report.verified.empty()) return {false, drafted};
  Verified row{true, std::min<std::size_t>(report.verified[b], drafted)};
  if (!report.model_drafted.empty()) {
    row.model = report.model_drafted[b];
    row.model_accepted = report.model_accepted[b];
  }
  return row;
}

// Counts the accepted tokens of a session's draft, and the tokens of the worker's own drafter since then.
void count_verified(const Session& session, const Verified& verified, std::size_t accepted, std::size_t model_accepted,
                    float verify_cost) REQUIRES(engine_lock) {
  NamespaceStats& counters = session.namespace_->counters;
  const std::span<const Origin> origins = session.draft.origins;
  if (!session.counted) count_drafted(counters, origins.first(verified.server));
  counters.verify_microsteps += microsteps((session.counted ? 0 : verified.server) + verified.model, verify_cost);
  counters.accepted_tokens += accepted;
  count(counters, origins.first(accepted), &SourceStats::accepted_tokens);
  counters.sources[kModel].draft_tokens += verified.model;
  counters.sources[kModel].accepted_tokens += model_accepted;
}

// Whether the session in row b of a request can step. `session` is null if it is not open.
Outcome outcome_of(const StepRequest& request, std::size_t b, const Session* session) {
  const std::int64_t position = request.positions[b], came = request.offsets[b + 1] - request.offsets[b];
  if (position > *request.most_tokens - came) return Outcome::kTooLong;
  return session && position <= session->context.generated ? Outcome::kStepped : Outcome::kUnknown;
}

std::string entry(const char* field, std::size_t b) { return std::string(field) + "[" + std::to_string(b) + "]"; }

void check_counts(const char* field, std::span<const std::int32_t> counts, std::size_t batch, std::int32_t most) {
  if (counts.size() != batch) {
    throw std::invalid_argument(std::string(field) + ": has " + std::to_string(counts.size()) + " entries, must have " +
                                std::to_string(batch) + " (one per session)");
  }
  for (std::size_t b = 0; b < batch; ++b) {
    if (counts[b] >= 0 && counts[b] <= most) continue;
    throw std::invalid_argument(entry(field, b) + ": is " + std::to_string(counts[b]) + ", must lie in [0, " +
                                std::to_string(most) + "]");
  }
}

// Checks the counts of a report: one for each session.
void check_report(const VerifiedReport& report, std::size_t batch) {
  const bool model = !report.model_drafted.empty() || !report.model_accepted.empty();
  if (report.verified.empty() && !model) return;
  check_counts("verified", report.verified, batch, kMaxDraft);
  if (!model) return;
  check_counts("model_drafted", report.model_drafted, batch, INT32_MAX);
  check_counts("model_accepted", report.model_accepted, batch, INT32_MAX);
  for (std::size_t b = 0; b < batch; ++b) {
    if (report.model_accepted[b] <= report.model_drafted[b]) continue;
    throw std::invalid_argument(entry("model_accepted", b) + ": is " + std::to_string(report.model_accepted[b]) +
                                ", more than " + entry("model_drafted", b) + ", " +
                                std::to_string(report.model_drafted[b]));
  }
}

}  // namespace

void require_tokens(const std::string& field, Tokens tokens) {
  const auto found = std::ranges::find_if(tokens, [](Token token) { return token < 0; });
  if (found == tokens.end()) return;
  throw std::invalid_argument(field + ": token " + std::to_string(*found) + " at " +
                              std::to_string(found - tokens.begin()) + " is outside [0, 2147483647]");
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
                                std::to_string(batch) + " (one per session)");
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
  check_report(r.report, batch);
  require_tokens("new_tokens", r.tokens);
}

// Finds and checks the sessions of the request. The pointers are valid until the lock is released.
void StepRunner::find_batch(const StepRequest& request, std::vector<Outcome>& outcomes) {
  batch_.clear();
  outcomes.clear();
  ++number_;
  for (std::size_t b = 0; b < request.sessions.size(); ++b) {
    Session* const known = contents_.registry.find_session(request.sessions[b]);
    if (request.most_tokens) {
      outcomes.push_back(outcome_of(request, b, known));
      if (outcomes.back() != Outcome::kStepped) continue;
    }
    Session& session = known ? *known : contents_.registry.session(request.sessions[b]);
    if (session.step == number_) {
      throw std::invalid_argument("sessions: " + std::to_string(request.sessions[b]) + " appears twice");
    }
    session.step = number_;
    const std::int64_t held = session.context.generated;
    if (!request.positions.empty() && (request.positions[b] < 0 || request.positions[b] > held)) {
      throw std::invalid_argument("positions[" + std::to_string(b) + "]: is " + std::to_string(request.positions[b]) +
                                  ", but the session has " + std::to_string(held) + " generated tokens");
    }
    auto twin = session.twin.lock();
    // A session may be opened before its problem is read from the store, so it looks again until it has generated text.
    if (!twin && held == 0 && session.name_of_twin) {
      session.twin = twin = session.problem->twin(*session.name_of_twin);
    }
    batch_.push_back({&session, b, twin ? Tokens(*twin) : Tokens()});
  }
}

void StepRunner::append(const Stepping& stepping, Tokens came, const VerifiedReport& report, float verify_cost) {
  if (came.empty()) return;
  Session& session = *stepping.session;
  if (session.noise) session.noise->prefetch(came);
  DraftContext& context = session.context;
  NamespaceStats& counters = session.namespace_->counters;
  Estimator& estimator = session.namespace_->estimator;
  const std::size_t before = estimator.bytes();
  // The estimator learns at every predicted position that these tokens reach, whichever drafter was verified.
  const std::size_t came_true = learn(estimator, session.draft, came, context);
  if (estimator.bytes() != before) contents_.ledger.update(*session.namespace_);
  const Verified verified = Verified::of(report, stepping.row, session.draft.tokens.size());
  const std::size_t accepted = std::min(came_true, verified.server);
  const std::size_t saved = accepted + std::min(verified.model_accepted, came.size() - accepted);
  count_verified(session, verified, accepted, saved - accepted, verify_cost);
  // Each step gives the accepted tokens and one more. Without a report, tokens beyond that took steps without drafts,
  // which say nothing about the yield of drafts.
  const std::size_t tokens = verified.reported ? came.size() : saved + 1;
  const auto steps = static_cast<float>(std::max<std::size_t>(1, tokens - saved));
  const std::size_t drafted = verified.server + verified.model;
  estimator.saw_step(static_cast<float>(tokens) / steps, static_cast<float>(drafted) / steps);
  // Clears the draft even if append() runs out of memory, so that the estimator does not learn from it twice.
  const struct Spent {
    Draft& draft;
    ~Spent() { draft.clear(); }
  } spent{session.draft};
  contents_.change_live(*session.problem, [&](LiveText& live) { live.append(session.text, came); });
  // The first token comes with the prompt. Of the other steps, the worker asked for a draft for at most one.
  const std::size_t covered = session.asked || context.generated == 0 ? saved + 1 : saved;
  counters.generated_tokens += came.size();
  counters.undrafted_tokens += came.size() - std::min(came.size(), covered);
  session.asked = false;
  for (Token token : came) {
    if (const Token* next = context.next_of(stepping.twin)) {
      session.namespace_->trust.learn(context.agreement, *next == token);
    }
    context.push(token, stepping.twin);
  }
  if (session.noise) count_noise(session, came);
  context.history_source.advance(came.size(), spent.draft.history_trail, came_true);
  context.namespace_source.advance(came.size(), spent.draft.namespace_trail, came_true);
}

// Counts the pairs of new tokens. If memory runs out, the noise stays unknown from here on.
void StepRunner::count_noise(Session& session, Tokens came) {
  const std::size_t before = session.noise_bytes();
  try {
    for (Token token : came) session.noise->push(token);
  } catch (const std::bad_alloc&) {
    session.noise.reset();
  }
  contents_.ledger.change_noise(before, session.noise_bytes());
}

// Only reads what the sessions share, so that they can draft in parallel.
void StepRunner::draft_all(DraftLimits limits) {
  // Sorted by problem, sessions of one problem find its index in the CPU cache.
  order_.resize(batch_.size());
  std::iota(order_.begin(), order_.end(), 0u);
  const auto problem_of = [this](std::uint32_t b)
                              REQUIRES(engine_lock) { return std::pair(batch_[b].session->problem.get(), b); };
  std::ranges::sort(order_, {}, problem_of);
  workers_.run(batch_.size(), [&](int worker, std::size_t first, std::size_t last) {
    assert_locked();  // the thread that runs this step holds the lock and waits for the workers
    for (std::size_t i = first; i < last; ++i) {
      if (i + 1 < last) fetch(*batch_[order_[i + 1]].session);
      draft_one(batch_[order_[i]], limits, ahead_[worker]);
    }
  });
}

void StepRunner::draft_one(const Stepping& stepping, DraftLimits limits, DraftContext& ahead) {
  Session& session = *stepping.session;
  const Namespace& namespace_ = *session.namespace_;
  const DraftSources sources = {*session.problem->segments, *namespace_.index.segments(),
                                LiveSource(*session.problem->live, session.text), stepping.twin};
  DraftContext& context = session.context;
  context.history_source.follow(sources.history, context.tail.tokens());
  context.namespace_source.follow(sources.namespace_, context.tail.tokens());
  if (!twin_alone(context, stepping.twin, namespace_.trust)) context.catch_up(sources);
  ahead = context;
  ahead.newest = namespace_.counters.newest_epoch;
  const auto& name = session.name_of_twin;
  if (session.noise) ahead.noise.start(name->seed, *session.noise);
  if (session.position_noise)
    ahead.noise.start(name->seed, static_cast<std::int64_t>(name->start) + context.generated - 1);
  draft(ahead, sources, namespace_.estimator, namespace_.trust, limits, session.draft);
}

void StepRunner::run(const StepRequest& request, StepResult& result) {
  result.tokens.clear();
  result.probabilities.clear();
  result.runners_up.clear();
  result.runner_up_probabilities.clear();
  result.offsets.assign(1, 0);
  find_batch(request, result.outcomes);
  if (request.max_tokens > 0) workers_.announce(batch_.size());
  // First all sessions append and the estimators learn, in order; then all sessions draft, from the same state.
  for (const Stepping& stepping : batch_) {
    const std::size_t b = stepping.row;
    Tokens came = request.tokens.subspan(request.offsets[b], request.offsets[b + 1] - request.offsets[b]);
    if (!request.positions.empty()) {
      const auto known = static_cast<std::size_t>(stepping.session->context.generated - request.positions[b]);
      came = came.subspan(std::min(known, came.size()));
    }
    append(stepping, came, request.report, request.verify_cost);
  }
  if (request.max_tokens > 0) draft_all({request.max_tokens, request.verify_cost});
  result.offsets.reserve(request.sessions.size() + 1);
  const auto drafted = [&result] { return static_cast<std::int64_t>(result.tokens.size()); };
  for (const auto& [session, row, twin] : batch_) {
    result.offsets.resize(row + 1, drafted());  // empty drafts for sessions that are left out
    if (request.max_tokens > 0) {
      const Draft& draft = session->draft;
      session->asked = true;
      NamespaceStats& counters = session->namespace_->counters;
      ++(draft.tokens.empty() ? counters.drafts_empty : counters.drafts_hit);
      session->counted = request.report.verified.empty();
      if (session->counted) {
        count_drafted(counters, draft.origins);
        counters.verify_microsteps += microsteps(draft.tokens.size(), request.verify_cost);
      }
      result.tokens.insert(result.tokens.end(), draft.tokens.begin(), draft.tokens.end());
      result.probabilities.insert(result.probabilities.end(), draft.probabilities.begin(), draft.probabilities.end());
      if (request.runners_up) {
        const std::size_t before = result.runners_up.size();
        result.runners_up.resize(result.tokens.size());
        result.runner_up_probabilities.resize(result.tokens.size());
        draft.runners_up(std::span(result.runners_up).subspan(before),
                         std::span(result.runner_up_probabilities).subspan(before));
      }
    }
    result.offsets.push_back(drafted());
  }
  result.offsets.resize(request.sessions.size() + 1, drafted());
}

}  // namespace histospec
