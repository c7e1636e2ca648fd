// Several threads that draft one batch, and several threads that call the engine at the same time.
#include <atomic>
#include <bit>
#include <thread>

#include "histospec/engine.h"
#include "random_text.h"
#include "test.h"

using namespace histospec;
using testing::Random;

namespace {

// All that an engine said in one run, as numbers: floats by their bits.
struct Said {
  std::vector<Token> tokens;
  std::vector<std::int64_t> offsets;
  std::vector<std::uint32_t> probabilities;
  std::vector<std::uint64_t> stats;
  std::size_t bytes = 0;

  bool operator==(const Said&) const = default;
};

struct Running {
  SessionId id;
  std::vector<Token> script;  // what the policy will say
  std::size_t said = 0;
};

// A policy that answers each problem nearly the same each time.
std::vector<Token> answer(Random& random, std::size_t problem) {
  Random fixed(problem);
  std::vector<Token> text = fixed.text(fixed.between(100, 400), 40);
  for (Token& token : text) {
    if (random.one_in(25)) token = static_cast<Token>(random.below(40));
  }
  return text;
}

Said play(int threads) {
  Random random(7);
  Engine engine({.history_epochs = 3, .threads = threads, .namespace_tokens = 1 << 14});
  Said said;
  std::vector<Running> running;
  StepResult result;
  std::size_t largest = 0;
  for (int round = 0; round < 150; ++round) {
    const std::size_t problem = random.below(9);
    const std::string name = problem % 3 == 0 ? "a" : problem % 3 == 1 ? "b" : "c";
    const std::vector<Token> prompt = {static_cast<Token>(problem), 5, 6, 7};
    if (random.one_in(4)) {
      const std::vector<Token> x = answer(random, problem), y = answer(random, problem);
      const std::vector<ResponseView> views = {{{}, x, {}, round / 30}, {{}, y, {}, round / 30}};
      engine.ingest(name, prompt, views);
    }
    for (int i = random.one_in(3) && running.size() < 120 ? 16 : 0; i > 0; --i) {
      running.push_back({engine.open(name, prompt, "", {}, 7).id, answer(random, problem)});
    }
    // The order in a batch is none of the engine's business.
    for (std::size_t i = running.size(); i > 1; --i) std::swap(running[i - 1], running[random.below(i)]);
    std::vector<SessionId> ids;
    std::vector<Token> tokens;
    std::vector<std::int64_t> offsets = {0};
    for (Running& session : running) {
      if (random.one_in(10)) continue;
      const std::size_t n = std::min(random.below(8), session.script.size() - session.said);
      tokens.insert(tokens.end(), session.script.begin() + static_cast<std::ptrdiff_t>(session.said),
                    session.script.begin() + static_cast<std::ptrdiff_t>(session.said + n));
      session.said += n;
      ids.push_back(session.id);
      offsets.push_back(static_cast<std::int64_t>(tokens.size()));
    }
    largest = std::max(largest, ids.size());
    engine.step({ids, tokens, offsets, {}, 12, 0.02f}, result);
    said.tokens.insert(said.tokens.end(), result.tokens.begin(), result.tokens.end());
    said.offsets.insert(said.offsets.end(), result.offsets.begin(), result.offsets.end());
    for (float p : result.probabilities) said.probabilities.push_back(std::bit_cast<std::uint32_t>(p));
    std::erase_if(running, [&](const Running& session) {
      const bool ends = session.said == session.script.size();
      if (ends) engine.close(session.id, !random.one_in(5));
      return ends;
    });
    engine.wait_until_built();  // else drafts depend on when a segment is ready
  }
  CHECK(largest >= 64);  // enough for several threads to have something to do
  CHECK(said.tokens.size() > 10000);
  for (const auto& [name, s] : engine.stats()) {
    for (std::uint64_t n :
         {s.lookups_hit, s.lookups_miss, s.drafts_hit, s.drafts_empty, s.draft_tokens, s.accepted_tokens,
          s.generated_tokens, s.undrafted_tokens, s.evicted(), s.problems, s.sessions, s.history_responses,
          s.history_tokens, static_cast<std::uint64_t>(s.newest_epoch)}) {
      said.stats.push_back(n);
    }
    for (const SourceStats& source : s.sources) {
      said.stats.push_back(source.draft_tokens);
      said.stats.push_back(source.accepted_tokens);
    }
  }
  said.bytes = engine.memory_bytes();
  engine.check_integrity();
  return said;
}

}  // namespace

TEST_CASE("Drafts do not depend on the number of threads") {
  const Said one = play(1);
  for (int threads : {1, 2, 5}) {
    CAPTURE(threads);
    const Said other = play(threads);
    CHECK_EQ(other.tokens, one.tokens);
    CHECK_EQ(other.offsets, one.offsets);
    CHECK_EQ(other.probabilities, one.probabilities);
    CHECK_EQ(other.stats, one.stats);
    CHECK(other == one);
  }
}

// Under the thread sanitizer, no race either. Batches are large enough for several threads, and their problems are
// common to all callers.
TEST_CASE("Many callers at once corrupt neither sessions nor counters") {
  constexpr std::size_t kBudget = 12 << 20;
  Engine engine({.memory_bytes = kBudget, .history_epochs = 2, .threads = 2, .namespace_tokens = 1 << 13});
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> generated{0};
  std::vector<std::thread> callers;
  for (int t = 0; t < 4; ++t) {
    callers.emplace_back([&, t] {
      INFO("caller ", t);
      Random random(static_cast<std::uint64_t>(t));
      StepResult result;
      for (int round = 0; round < 8; ++round) {
        std::vector<SessionId> ids;
        std::vector<std::vector<Token>> texts(random.between(1, 5) * 10);
        for (std::size_t i = 0; i < texts.size(); ++i) {
          const std::vector<Token> prompt = {static_cast<Token>(random.below(3)), 5};
          ids.push_back(engine.open(random.one_in(3) ? "b" : "a", prompt, "", {}, 7).id);
        }
        for (int s = 0; s < 8; ++s) {
          if (random.one_in(4)) {
            const std::vector<Token> prompt = {static_cast<Token>(random.below(3)), 5};
            const std::vector<Token> x = random.text(500, 9), y = random.text(800, 9);
            const std::vector<ResponseView> views = {{{}, x, {}, round / 3}, {{}, y, {}, round / 3}};
            engine.ingest(random.one_in(3) ? "b" : "a", prompt, views);
          }
          std::vector<Token> tokens;
          std::vector<std::int64_t> offsets = {0};
          for (auto& text : texts) {
            const std::vector<Token> came = random.text(random.below(20), 9);
            text.insert(text.end(), came.begin(), came.end());
            tokens.insert(tokens.end(), came.begin(), came.end());
            offsets.push_back(static_cast<std::int64_t>(tokens.size()));
          }
          generated += tokens.size();
          engine.step({ids, tokens, offsets, {}, 8, 0.01f}, result);
          CHECK_EQ(result.offsets.size(), ids.size() + 1);
          for (Token token : result.tokens) CHECK((token >= 0 && token < 9));
        }
        for (std::size_t i = 0; i < texts.size(); ++i) {
          CHECK_EQ(engine.generated(ids[i]), texts[i]);
          engine.close(ids[i], random.one_in(2));
        }
      }
    });
  }
  callers.emplace_back([&] {
    const std::vector<Token> prompt = {1, 5};
    const std::vector<double> quantiles = {0.5};
    for (int i = 0; !stop; ++i) {
      engine.stats();
      engine.memory_bytes();
      engine.history("a", prompt);
      engine.predict_length("a", prompt, 10, quantiles);
      if (i % 20 == 0) engine.drop_namespace("b");
      if (i % 10 == 0) engine.check_integrity();
      if (i % 15 == 0) engine.wait_until_built();
      std::this_thread::yield();
    }
  });
  for (std::size_t t = 0; t + 1 < callers.size(); ++t) callers[t].join();
  stop = true;
  callers.back().join();
  engine.wait_until_built();
  engine.check_integrity();
  std::uint64_t sessions = 0, counted = 0;
  for (const auto& [name, stats] : engine.stats()) {
    sessions += stats.sessions;
    counted += stats.generated_tokens;
  }
  CHECK_EQ(sessions, 0u);
  CHECK(counted <= generated.load());  // what was counted may be forgotten with its namespace
  CHECK(engine.memory_bytes() <= kBudget);
}
