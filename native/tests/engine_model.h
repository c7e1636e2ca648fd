// Runs bytes as a sequence of engine operations, and mirrors each into a naive model of the engine. The fuzzer, the
// replay of its corpus and random tests share this code. Any difference throws Difference.
//
// There are two modes. With much memory the model predicts history, windows, lengths and every counter exactly. With
// little memory it cannot predict evictions, so it checks that every added response is held, counted as evicted, or
// dropped, and that the budget holds.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <deque>
#include <map>
#include <set>

#include "draft/evidence.h"
#include "histospec/engine.h"
#include "index/segments.h"
#include "model_check.h"

namespace histospec::testing {

class Bytes {
 public:
  explicit Bytes(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}
  bool empty() const { return next_ >= bytes_.size(); }
  std::size_t byte() { return empty() ? 0u : bytes_[next_++]; }
  std::size_t below(std::size_t n) { return byte() % n; }
  bool one_in(std::size_t n) { return below(n) == n - 1; }

 private:
  std::span<const std::uint8_t> bytes_;
  std::size_t next_ = 0;
};

class EngineModel {
 public:
  // Everything the engine drafted, as one number: the same bytes must always give the same, whatever the number of
  // threads (0: the input says how many).
  static std::uint64_t run(std::span<const std::uint8_t> input, int threads = 0) {
    Bytes bytes(input);
    EngineModel model(bytes, threads);
    for (int operation = 0; !bytes.empty() && operation < kMaxOperations; ++operation) model.operate(operation);
    model.finish();
    return model.digest_;
  }

 private:
  static constexpr int kMaxOperations = 150;
  static constexpr std::size_t kPrompts = 4;
  static constexpr std::size_t kMaxSessions = 64;
  static constexpr std::size_t kGroup = 16;  // sessions that sometimes open together
  using Key = std::pair<std::string, std::vector<Token>>;

  struct Finished {
    std::vector<Token> tokens;
    std::vector<std::uint8_t> mask;
    std::int64_t epoch = 0;
  };

  using Seed = std::optional<std::int64_t>;
  using Name = std::pair<std::int64_t, std::size_t>;  // of a twin: its seed, and the length of its prompt

  struct Problem {
    std::vector<std::vector<Finished>> segments;
    std::vector<Finished> waiting;                      // finished, while siblings still run
    std::vector<std::pair<Name, std::int64_t>> seeded;  // what had a seed since the last drop, and its epoch
    std::set<SessionId> sessions;

    std::vector<Finished> history() const {
      std::vector<Finished> all;
      for (const auto& segment : segments) all.insert(all.end(), segment.begin(), segment.end());
      all.insert(all.end(), waiting.begin(), waiting.end());
      return all;
    }
    // Whether one of that name was of the newest two epochs that had any.
    bool has_twin(const Name& name) const {
      std::set<std::int64_t> epochs;
      for (const auto& [its, epoch] : seeded) epochs.insert(epoch);
      while (epochs.size() > 2) epochs.erase(epochs.begin());
      return std::ranges::any_of(seeded, [&](const auto& s) { return s.first == name && epochs.contains(s.second); });
    }
  };

  struct NamespaceModel {
    std::map<Key, Problem> problems;
    std::deque<std::int64_t> latest_lengths;
    NamespaceStats counters;
    std::uint64_t added = 0, dropped = 0;
    bool emptied = false;    // dropped, and nothing has come since
    std::set<Token> tokens;  // everything that a draft may be made of
  };

  struct Session {
    std::size_t namespace_;
    Key key;
    std::vector<Token> prompt, generated, draft;
    Seed seed;
    bool asked = false;   // for a draft, since its last tokens came
    bool counted = true;  // the draft's tokens
  };

  struct Limits {
    int epochs;
    bool ample;
    EngineOptions options;
  };

  EngineModel(Bytes& bytes, int threads) : bytes_(bytes), limits_(limits(bytes, threads)), engine_(limits_.options) {}

  static Limits limits(Bytes& bytes, int threads) {
    const std::size_t first = bytes.byte();
    Limits out{static_cast<int>(1 + first % 3), !bytes.one_in(3), {}};
    out.options.history_epochs = out.epochs;
    out.options.threads = threads > 0 ? threads : static_cast<int>(1 + first / 3 % 4);
    constexpr std::size_t kIndexTokens[] = {0, 64, 5000, 1 << 22};
    out.options.namespace_tokens = kIndexTokens[bytes.below(4)];
    if (!out.ample) out.options.memory_bytes = 400'000 + 10'000 * bytes.below(64);
    return out;
  }

  void operate(int operation) {
    const std::size_t what = bytes_.below(16);
    subject = "operation " + std::to_string(operation) + ", kind " + std::to_string(what);
    if (what <= 2) {
      ingest();
    } else if (what <= 5) {
      open();
    } else if (what <= 9) {
      step();
    } else if (what <= 11) {
      close();
    } else if (what == 12) {
      if (bytes_.one_in(4)) drop();
    } else if (what == 13) {
      nonsense();
    } else {
      ask();
    }
    engine_.wait_until_built();
    if (operation % 8 == 0) check_all();
  }

  void finish() {
    subject = "at the end";
    check_all();
    while (!sessions_.empty()) close();
    engine_.wait_until_built();
    check_all();
  }

  // --- Operations ---

  static std::string name_of(std::size_t namespace_) { return namespace_ == 0 ? "red" : "blue"; }
  // The namespaces share no token: a draft that mixes them shows.
  static Token first_token(std::size_t namespace_) { return namespace_ == 0 ? 0 : 1000; }

  std::vector<Token> text(std::size_t namespace_, std::size_t size) {
    const std::size_t alphabet = 1 + bytes_.below(6), kind = bytes_.below(3), period = 1 + bytes_.below(5);
    std::vector<Token> out(size);
    for (std::size_t i = 0; i < size; ++i) {
      out[i] = kind == 0 && i >= period ? out[i - period]
               : kind == 1 && i > 0     ? first_token(namespace_) + static_cast<Token>((i * i / period) % alphabet)
                                        : first_token(namespace_) + static_cast<Token>(bytes_.below(alphabet));
    }
    return out;
  }

  struct Chosen {
    std::size_t namespace_;
    std::vector<Token> prompt;
    std::string id;
    Key key;
  };

  Chosen choose() {
    Chosen c;
    c.namespace_ = bytes_.below(2);
    const std::size_t which = bytes_.below(kPrompts);
    for (std::size_t i = 0; i < 1 + 9 * which; ++i) {
      c.prompt.push_back(first_token(c.namespace_) + static_cast<Token>((which + i * (which + 1)) % 7));
    }
    if (bytes_.one_in(4)) c.id = "problem-" + std::to_string(bytes_.below(2));
    c.key = {c.id, c.id.empty() ? c.prompt : std::vector<Token>()};
    return c;
  }

  Seed choose_seed() {
    if (!bytes_.one_in(2)) return {};
    return static_cast<std::int64_t>(bytes_.below(4)) - 1;
  }

  void see(std::size_t namespace_, const std::vector<Token>& tokens) {
    namespaces_[namespace_].tokens.insert(tokens.begin(), tokens.end());
  }

  void ingest() {
    const Chosen c = choose();
    const auto epoch = static_cast<std::int64_t>(bytes_.below(8));
    std::vector<Finished> responses(bytes_.below(4));
    std::vector<ResponseView> views;
    std::vector<std::int64_t> seeded;
    for (Finished& r : responses) {
      r.tokens = text(c.namespace_, bytes_.one_in(8) ? 2000 : bytes_.below(100));
      r.epoch = epoch;
      if (bytes_.one_in(3)) {
        for (std::size_t i = 0; i < r.tokens.size(); ++i) r.mask.push_back(i % 5 == 2 ? 0 : 1);
      }
      const Seed seed = choose_seed();
      views.push_back({{}, r.tokens, r.mask, r.epoch, seed});
      if (seed && !r.tokens.empty()) seeded.push_back(*seed);  // no mask begins with 0
    }
    engine_.ingest(name_of(c.namespace_), c.prompt, views, c.id);
    std::erase_if(responses, [](const Finished& r) { return r.tokens.empty(); });
    if (responses.empty()) return;
    see(c.namespace_, c.prompt);
    for (const Finished& r : responses) {
      see(c.namespace_, r.tokens);
      saw_response(namespaces_[c.namespace_], r);
    }
    Problem& problem = namespaces_[c.namespace_].problems[c.key];
    for (std::int64_t seed : seeded) problem.seeded.push_back({{seed, c.prompt.size()}, epoch});
    add_segment(namespaces_[c.namespace_], problem, responses);
  }

  // One session, or a group of them: enough for a batch that threads share.
  void open() {
    const Chosen c = choose();
    const std::size_t how = bytes_.byte();
    const std::vector<Token> generated = how % 4 == 3 ? text(c.namespace_, bytes_.below(40)) : std::vector<Token>();
    for (std::size_t n = how >= 224 ? kGroup : 1; n > 0 && sessions_.size() < kMaxSessions; --n) open(c, generated);
  }

  void open(const Chosen& c, const std::vector<Token>& generated) {
    const Seed seed = choose_seed();
    const auto [id, prompt_length, known] = engine_.open(name_of(c.namespace_), c.prompt, c.id, generated, seed);
    MODEL_CHECK(!sessions_.contains(id));
    MODEL_CHECK_EQ(prompt_length, c.prompt.size());
    NamespaceModel& namespace_ = namespaces_[c.namespace_];
    Problem& problem = namespace_.problems[c.key];
    if (limits_.ample) MODEL_CHECK_EQ(known, !problem.history().empty());
    ++(known ? namespace_.counters.lookups_hit : namespace_.counters.lookups_miss);
    if (seed) {
      ++(problem.has_twin({*seed, c.prompt.size()}) ? namespace_.counters.twins_hit : namespace_.counters.twins_miss);
    }
    problem.sessions.insert(id);
    sessions_[id] = {c.namespace_, c.key, c.prompt, generated, {}, seed};
    see(c.namespace_, c.prompt);
    see(c.namespace_, generated);
  }

  void step() {
    std::vector<SessionId> ids;
    std::vector<Token> tokens;
    std::vector<std::int64_t> offsets = {0}, positions;
    const bool positioned = bytes_.one_in(2);
    std::vector<std::vector<Token>> came;
    for (const auto& [id, session] : sessions_) {
      if (bytes_.one_in(3)) continue;
      std::vector<Token> sent = text(session.namespace_, bytes_.below(bytes_.one_in(8) ? 120 : 8));
      // Often what was drafted, so that there is something to accept.
      if (bytes_.one_in(2)) sent.insert(sent.begin(), session.draft.begin(), session.draft.end());
      came.push_back(sent);
      std::int64_t position = static_cast<std::int64_t>(session.generated.size());
      if (positioned) {
        // A retry repeats what the session has; then its new tokens may follow or not.
        const std::size_t repeated = std::min(session.generated.size(), bytes_.below(10));
        sent.insert(sent.begin(), session.generated.end() - static_cast<std::ptrdiff_t>(repeated),
                    session.generated.end());
        position -= static_cast<std::int64_t>(repeated);
        if (bytes_.one_in(4)) {
          sent.resize(bytes_.below(repeated + 1));
          came.back().clear();
        }
      }
      ids.push_back(id);
      positions.push_back(position);
      tokens.insert(tokens.end(), sent.begin(), sent.end());
      offsets.push_back(static_cast<std::int64_t>(tokens.size()));
    }
    const int max_tokens = bytes_.one_in(6) ? 0 : static_cast<int>(bytes_.below(24));
    constexpr float kCosts[] = {0.0f, 0.001f, 0.05f, 0.3f, 1.0f, INFINITY};
    const float verify_cost = kCosts[bytes_.below(6)];
    if (!positioned) positions.clear();
    const bool reported = bytes_.one_in(2), models = bytes_.one_in(2);
    std::array<std::vector<std::int32_t>, 3> said;
    for (std::size_t b = 0; reported && b < ids.size(); ++b) {
      said[0].push_back(static_cast<std::int32_t>(bytes_.below(24)));
      if (!models) continue;
      said[1].push_back(static_cast<std::int32_t>(bytes_.below(12)));
      said[2].push_back(static_cast<std::int32_t>(bytes_.below(static_cast<std::size_t>(said[1].back()) + 1)));
    }
    StepResult& result = result_;  // used again and again
    engine_.step({ids, tokens, offsets, positions, max_tokens, verify_cost, {}, {said[0], said[1], said[2]}}, result);

    for (std::size_t b = 0; b < ids.size(); ++b) {
      Session& session = sessions_.at(ids[b]);
      NamespaceModel& namespace_ = namespaces_[session.namespace_];
      session.generated.insert(session.generated.end(), came[b].begin(), came[b].end());
      see(session.namespace_, came[b]);
      namespace_.counters.generated_tokens += came[b].size();
      if (came[b].empty()) continue;
      std::size_t accepted = 0;
      while (accepted < std::min(session.draft.size(), came[b].size()) &&
             session.draft[accepted] == came[b][accepted]) {
        ++accepted;
      }
      std::size_t verified = session.draft.size(), steps = came[b].size();
      if (reported) verified = std::min(verified, static_cast<std::size_t>(said[0][b]));
      accepted = std::min(accepted, verified);
      namespace_.counters.accepted_tokens += accepted;
      std::size_t priced = session.counted ? 0 : verified;
      if (!session.counted) namespace_.counters.draft_tokens += verified;
      steps -= accepted;
      if (reported && models) {
        SourceStats& model = namespace_.counters.sources[kModel];
        const std::size_t model_accepted = std::min(static_cast<std::size_t>(said[2][b]), steps);
        model.draft_tokens += static_cast<std::uint64_t>(said[1][b]);
        priced += static_cast<std::size_t>(said[1][b]);
        model.accepted_tokens += model_accepted;
        steps -= model_accepted;
      }
      namespace_.counters.verify_microsteps += price(priced, verify_cost);
      // The first token comes with the prompt, and one step was asked a draft for. All others were not.
      const bool first = session.generated.size() == came[b].size();
      if (steps > 0) namespace_.counters.undrafted_tokens += steps - (session.asked || first ? 1 : 0);
      session.asked = false;
      session.draft.clear();
    }
    check_drafts(result, ids, max_tokens, verify_cost, reported && !ids.empty());
  }

  // In millionths of a step; a cost above 16 counts as 16.
  static std::uint64_t price(std::size_t tokens, float verify_cost) {
    return static_cast<std::uint64_t>(
        std::llround(1e6 * static_cast<double>(std::min(verify_cost, 16.0f)) * static_cast<double>(tokens)));
  }

  void check_drafts(const StepResult& result, const std::vector<SessionId>& ids, int max_tokens, float verify_cost,
                    bool reported) {
    MODEL_CHECK_EQ(result.offsets.size(), ids.size() + 1);
    MODEL_CHECK_EQ(result.offsets[0], 0);
    MODEL_CHECK_EQ(result.offsets.back(), static_cast<std::int64_t>(result.tokens.size()));
    MODEL_CHECK_EQ(result.tokens.size(), result.probabilities.size());
    for (std::size_t b = 0; b < ids.size(); ++b) {
      Session& session = sessions_.at(ids[b]);
      NamespaceModel& namespace_ = namespaces_[session.namespace_];
      const std::int64_t first = result.offsets[b], last = result.offsets[b + 1];
      MODEL_CHECK(first <= last && last - first <= max_tokens);
      if (verify_cost >= 1) MODEL_CHECK_EQ(first, last);
      for (std::int64_t i = first; i < last; ++i) {
        MODEL_CHECK(namespace_.tokens.contains(result.tokens[i]));
        MODEL_CHECK(result.probabilities[i] > 0 && result.probabilities[i] < 1);
        digest_ = (digest_ ^ static_cast<std::uint64_t>(result.tokens[i])) * 0x9E3779B97F4A7C15u + 1;
        digest_ = digest_ * 31 + std::bit_cast<std::uint32_t>(result.probabilities[i]);
      }
      digest_ = digest_ * 31 + static_cast<std::uint64_t>(last - first);
      if (max_tokens == 0) continue;
      session.asked = true;
      session.draft.assign(result.tokens.begin() + first, result.tokens.begin() + last);
      ++(session.draft.empty() ? namespace_.counters.drafts_empty : namespace_.counters.drafts_hit);
      session.counted = !reported;
      if (!session.counted) continue;
      namespace_.counters.draft_tokens += session.draft.size();
      namespace_.counters.verify_microsteps += price(session.draft.size(), verify_cost);
    }
  }

  void close() {
    if (sessions_.empty()) return;
    const auto which = std::next(sessions_.begin(), static_cast<std::ptrdiff_t>(bytes_.below(sessions_.size())));
    const SessionId id = which->first;
    const Session session = which->second;
    NamespaceModel& namespace_ = namespaces_[session.namespace_];
    bool commit = !bytes_.one_in(3);
    std::optional<std::int64_t> epoch;
    if (bytes_.one_in(2)) epoch = static_cast<std::int64_t>(bytes_.below(8));
    // Every third close expects the right length, and every third a wrong one, which does not commit.
    std::optional<std::size_t> expected;
    if (id % 3 > 0) expected = session.generated.size() + static_cast<std::size_t>(id % 3 - 1);
    const std::optional<std::vector<Token>> said = engine_.close(id, commit, epoch, {}, expected);
    MODEL_CHECK_EQ(said.has_value(), id % 3 == 1);
    if (said) MODEL_CHECK_EQ(*said, session.generated);
    commit = commit && id % 3 < 2;
    sessions_.erase(id);
    Problem& problem = namespace_.problems.at(session.key);
    problem.sessions.erase(id);
    if (commit && !session.generated.empty()) {
      const Finished finished{session.generated, {}, epoch.value_or(namespace_.counters.newest_epoch)};
      saw_response(namespace_, finished);
      const auto later = [&](const Finished& r) { return r.epoch > finished.epoch; };
      problem.waiting.insert(std::ranges::find_if(problem.waiting, later), finished);
      if (session.seed) problem.seeded.push_back({{*session.seed, session.prompt.size()}, finished.epoch});
    }
    MODEL_CHECK_THROWS(UnknownSession, engine_.close(id));
    MODEL_CHECK(!engine_.close(id, commit, epoch, {}, session.generated.size()));
    if (problem.sessions.empty() && !problem.waiting.empty()) {
      add_segment(namespace_, problem, std::exchange(problem.waiting, {}));
    }
    if (namespace_.emptied && problem.sessions.empty()) {
      namespace_.problems.erase(session.key);
      if (namespace_.problems.empty()) namespaces_.erase(session.namespace_);
    }
  }

  void drop() {
    const std::size_t which = bytes_.below(2);
    NamespaceModel& namespace_ = namespaces_[which];
    std::uint64_t held = 0;
    for (const auto& [key, problem] : namespace_.problems) held += problem.history().size();
    const std::uint64_t dropped = engine_.drop_namespace(name_of(which));
    if (limits_.ample) MODEL_CHECK_EQ(dropped, held);
    namespace_.dropped += dropped;
    std::erase_if(namespace_.problems, [](const auto& entry) { return entry.second.sessions.empty(); });
    for (auto& [key, problem] : namespace_.problems) {
      problem.segments.clear();
      problem.waiting.clear();
      problem.seeded.clear();
    }
    namespace_.latest_lengths.clear();
    namespace_.counters.newest_epoch = 0;
    namespace_.tokens.clear();
    for (const auto& [id, session] : sessions_) {
      if (session.namespace_ != which) continue;
      see(which, session.prompt);
      see(which, session.generated);
    }
    namespace_.emptied = true;
    if (namespace_.problems.empty()) namespaces_.erase(which);
  }

  // Whatever is wrong is refused, and changes nothing.
  void nonsense() {
    const Chosen c = choose();
    const std::string name = name_of(c.namespace_);
    std::vector<SessionId> ids;
    for (const auto& [id, session] : sessions_) ids.push_back(id);
    std::vector<Token> tokens(ids.empty() ? 0 : ids.size() + 2, first_token(c.namespace_));
    std::vector<std::int64_t> offsets, positions(ids.size(), 0);
    for (std::size_t b = 0; b <= ids.size(); ++b) offsets.push_back(static_cast<std::int64_t>(b));
    offsets.back() = static_cast<std::int64_t>(tokens.size());
    const auto refused = [&] {
      MODEL_CHECK_THROWS(std::exception, engine_.step({ids, tokens, offsets, positions, 4, 0.05f}, result_));
    };
    const auto before = snapshot();
    const std::size_t what = bytes_.below(11);
    if (what == 0) {
      ids.push_back(999999999);
      offsets.push_back(offsets.back());
      positions.clear();
      MODEL_CHECK_THROWS(UnknownSession, engine_.step({ids, tokens, offsets, positions, 4, 0.05f}, result_));
    } else if (what == 1 && !ids.empty()) {
      ids.push_back(ids.front());
      offsets.push_back(offsets.back());
      positions.clear();
      refused();
    } else if (what == 2 && !ids.empty()) {
      tokens.back() = -1;
      refused();
    } else if (what == 3 && !ids.empty()) {
      positions.back() = static_cast<std::int64_t>(sessions_.at(ids.back()).generated.size()) + 1;
      refused();
    } else if (what == 4) {
      offsets.back() += 1;
      refused();
    } else if (what == 5) {
      offsets.front() = 1;
      refused();
    } else if (what == 6) {
      offsets.pop_back();
      refused();
    } else if (what == 7) {
      MODEL_CHECK_THROWS(std::invalid_argument, engine_.step({ids, tokens, offsets, {}, -1, 0.05f}, result_));
      MODEL_CHECK_THROWS(std::invalid_argument, engine_.step({ids, tokens, offsets, {}, 4, NAN}, result_));
      MODEL_CHECK_THROWS(std::invalid_argument, engine_.step({ids, tokens, offsets, {}, 4, -0.1f}, result_));
    } else if (what == 8 && !ids.empty()) {
      const auto refused_report = [&](std::vector<std::int32_t> verified, std::vector<std::int32_t> drafted,
                                      std::vector<std::int32_t> accepted) {
        const StepRequest request = {ids, tokens, offsets, positions, 4, 0.05f, {}, {verified, drafted, accepted}};
        MODEL_CHECK_THROWS(std::invalid_argument, engine_.step(request, result_));
      };
      const std::vector<std::int32_t> zeros(ids.size()), longer(ids.size() + 1), ones(ids.size(), 1);
      refused_report(longer, {}, {});
      refused_report({}, zeros, zeros);
      refused_report(zeros, zeros, {});
      refused_report(zeros, zeros, ones);
      refused_report(std::vector<std::int32_t>(ids.size(), -1), {}, {});
      refused_report(std::vector<std::int32_t>(ids.size(), kMaxDraft + 1), {}, {});
    } else if (what == 9) {
      const std::vector<Token> bad = {first_token(c.namespace_), INT32_MIN};
      const std::vector<std::uint8_t> mask = {1};
      const std::vector<ResponseView> views = {{{}, c.prompt, {}, 9}, {{}, bad, {}, 9}};
      const std::vector<ResponseView> masked = {{{}, c.prompt, {}, 9}, {{}, tokens, mask, 9}};
      MODEL_CHECK_THROWS(std::invalid_argument, engine_.ingest(name, c.prompt, views, c.id));
      MODEL_CHECK_THROWS(std::invalid_argument, engine_.ingest(name, c.prompt, masked, c.id));
      MODEL_CHECK_THROWS(std::invalid_argument, engine_.ingest(name, {}, views));
      MODEL_CHECK_THROWS(std::invalid_argument, engine_.ingest("", c.prompt, views));
      MODEL_CHECK_THROWS(std::invalid_argument, engine_.open(name, bad));
      MODEL_CHECK_THROWS(std::invalid_argument, engine_.open(name, c.prompt, c.id, bad));
    } else {
      MODEL_CHECK_THROWS(UnknownSession, engine_.close(0));
      MODEL_CHECK_THROWS(UnknownSession, engine_.generated(-5));
      const std::vector<double> quantiles = {0.5, 1.5};
      MODEL_CHECK_THROWS(std::invalid_argument, engine_.predict_length(name, c.prompt, 0, quantiles));
      engine_.history("absent", c.prompt);
    }
    MODEL_CHECK(snapshot() == before);
  }

  void ask() {
    const Chosen c = choose();
    const Problem* problem = find(c.namespace_, c.key);
    const std::vector<Response> history = engine_.history(name_of(c.namespace_), c.prompt, c.id);
    std::vector<std::int64_t> lengths;
    const auto threshold = static_cast<std::int64_t>(bytes_.below(60));
    for (const Response& r : history) {
      if (static_cast<std::int64_t>(r.tokens.size()) > threshold) {
        lengths.push_back(static_cast<std::int64_t>(r.tokens.size()));
      }
    }
    if (lengths.empty() && namespaces_.contains(c.namespace_)) {
      for (std::int64_t length : namespaces_[c.namespace_].latest_lengths) {
        if (length > threshold) lengths.push_back(length);
      }
    }
    if (limits_.ample) {
      const std::vector<Finished> expected = problem ? problem->history() : std::vector<Finished>();
      MODEL_CHECK_EQ(history.size(), expected.size());
      for (std::size_t i = 0; i < history.size(); ++i) {
        MODEL_CHECK_EQ(history[i].tokens, expected[i].tokens);
        MODEL_CHECK_EQ(history[i].epoch, expected[i].epoch);
        const auto& mask = expected[i].mask;
        const bool all = std::ranges::all_of(mask, [](std::uint8_t m) { return m != 0; });
        MODEL_CHECK_EQ(history[i].generated, all ? std::vector<std::uint8_t>() : mask);
      }
    }
    const std::vector<double> quantiles = {0, 0.3, 0.5, 1};
    const LengthPrediction prediction =
        engine_.predict_length(name_of(c.namespace_), c.prompt, threshold, quantiles, c.id);
    MODEL_CHECK_EQ(prediction.observations, lengths.size());
    MODEL_CHECK_EQ(prediction.lengths.size(), lengths.empty() ? 0 : quantiles.size());
    std::ranges::sort(lengths);
    for (std::size_t q = 0; q < prediction.lengths.size(); ++q) {
      const double rank = quantiles[q] * static_cast<double>(lengths.size() - 1);
      const auto low = static_cast<double>(lengths[static_cast<std::size_t>(std::floor(rank))]);
      const auto high = static_cast<double>(lengths[static_cast<std::size_t>(std::ceil(rank))]);
      MODEL_CHECK(std::abs(prediction.lengths[q] - (low + (high - low) * (rank - std::floor(rank)))) < 1e-9);
    }
  }

  // --- The model's own housekeeping ---

  const Problem* find(std::size_t namespace_, const Key& key) const {
    const auto s = namespaces_.find(namespace_);
    if (s == namespaces_.end()) return nullptr;
    const auto p = s->second.problems.find(key);
    return p == s->second.problems.end() ? nullptr : &p->second;
  }

  static void saw_response(NamespaceModel& namespace_, const Finished& r) {
    ++namespace_.added;
    namespace_.emptied = false;
    namespace_.latest_lengths.push_back(static_cast<std::int64_t>(r.tokens.size()));
    if (namespace_.latest_lengths.size() > 256) namespace_.latest_lengths.pop_front();
    namespace_.counters.newest_epoch = std::max(namespace_.counters.newest_epoch, r.epoch);
  }

  static std::size_t tokens_of(const std::vector<Finished>& segment) {
    std::size_t n = 0;
    for (const Finished& r : segment) n += r.tokens.size();
    return n;
  }

  void add_segment(NamespaceModel& namespace_, Problem& problem, std::vector<Finished> fresh) const {
    auto& segments = problem.segments;
    segments.push_back(std::move(fresh));
    std::set<std::int64_t> epochs;
    for (const auto& segment : segments) {
      for (const Finished& r : segment) epochs.insert(r.epoch);
    }
    while (epochs.size() > static_cast<std::size_t>(limits_.epochs)) epochs.erase(epochs.begin());
    const auto old = [&](const Finished& r) { return r.epoch < *epochs.begin(); };
    std::erase_if(segments, [&](const auto& segment) {
      if (!std::ranges::all_of(segment, old)) return false;
      namespace_.counters.evicted_by_epochs += segment.size();
      return true;
    });
    const MergePolicy policy;
    for (bool merged = true; merged;) {
      // The newest segments, as long as the next older one is not twice as large as any of them.
      std::size_t first = segments.size(), all = 0, largest = 0;
      while (first > 0 && (first == segments.size() || tokens_of(segments[first - 1]) < policy.growth * largest)) {
        largest = std::max(largest, tokens_of(segments[--first]));
        all += tokens_of(segments[first]);
      }
      merged = segments.size() - first >= (all <= policy.small ? policy.fan_in : 2);
      while (merged && segments.size() > first + 1) {
        auto& into = segments[first];
        into.insert(into.end(), segments[first + 1].begin(), segments[first + 1].end());
        segments.erase(segments.begin() + static_cast<std::ptrdiff_t>(first) + 1);
      }
      if (merged) namespace_.counters.evicted_by_epochs += std::erase_if(segments[first], old);
    }
  }

  struct Snapshot {
    std::vector<std::vector<std::uint64_t>> stats;
    std::vector<std::int64_t> lengths;
    std::size_t bytes;
    bool operator==(const Snapshot&) const = default;
  };

  static std::vector<std::uint64_t> numbers(const NamespaceStats& s) {
    return {s.lookups_hit,
            s.lookups_miss,
            s.twins_hit,
            s.twins_miss,
            s.drafts_hit,
            s.drafts_empty,
            s.draft_tokens,
            s.accepted_tokens,
            s.generated_tokens,
            s.undrafted_tokens,
            s.verify_microsteps,
            s.evicted(),
            s.problems,
            s.sessions,
            s.history_responses,
            s.history_tokens,
            static_cast<std::uint64_t>(s.newest_epoch),
            s.sources[kModel].draft_tokens,
            s.sources[kModel].accepted_tokens};
  }

  Snapshot snapshot() const {
    Snapshot out;
    for (const auto& [name, stats] : engine_.stats()) out.stats.push_back(numbers(stats));
    std::vector<SessionId> ids;
    for (const auto& [id, session] : sessions_) ids.push_back(id);
    out.lengths = engine_.lengths(ids);
    out.bytes = engine_.memory_bytes();
    return out;
  }

  void check_all() {
    engine_.check_integrity();
    std::vector<SessionId> ids = {0};
    std::vector<std::int64_t> lengths = {-1};
    for (const auto& [id, session] : sessions_) {
      ids.push_back(id);
      lengths.push_back(static_cast<std::int64_t>(session.generated.size()));
      MODEL_CHECK_EQ(engine_.generated(id), session.generated);
    }
    MODEL_CHECK_EQ(engine_.lengths(ids), lengths);
    const auto stats = engine_.stats();
    std::uint64_t history = 0;
    for (const auto& [name, held] : stats) history += held.history_responses;
    for (const auto& [which, namespace_] : namespaces_) {
      const NamespaceStats& held = stats.at(name_of(which));
      MODEL_CHECK_EQ(held.newest_epoch, namespace_.counters.newest_epoch);
      MODEL_CHECK_EQ(held.history_responses + held.evicted() + namespace_.dropped, namespace_.added);
      SourceStats all;
      for (const SourceStats& source : held.sources) {
        MODEL_CHECK(source.accepted_tokens <= source.draft_tokens);
        if (&source == &held.sources[kModel]) continue;  // not drafted here
        all.draft_tokens += source.draft_tokens;
        all.accepted_tokens += source.accepted_tokens;
      }
      MODEL_CHECK_EQ(all.draft_tokens, held.draft_tokens);
      MODEL_CHECK_EQ(all.accepted_tokens, held.accepted_tokens);
      if (!limits_.ample) continue;
      NamespaceStats expected = namespace_.counters;
      expected.problems = namespace_.problems.size();
      for (const auto& [key, problem] : namespace_.problems) {
        expected.sessions += problem.sessions.size();
        for (const Finished& r : problem.history()) {
          ++expected.history_responses;
          expected.history_tokens += r.tokens.size();
        }
      }
      MODEL_CHECK_EQ(numbers(held), numbers(expected));
    }
    if (limits_.ample) MODEL_CHECK_EQ(stats.size(), namespaces_.size());
    if (!limits_.ample) MODEL_CHECK(engine_.memory_bytes() <= limits_.options.memory_bytes || history == 0);
  }

  Bytes& bytes_;
  const Limits limits_;
  Engine engine_;
  std::map<std::size_t, NamespaceModel> namespaces_;
  std::map<SessionId, Session> sessions_;
  StepResult result_;
  std::uint64_t digest_ = 1;
};

}  // namespace histospec::testing
