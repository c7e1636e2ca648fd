// Sessions with a twin: their drafts, and twins that are not trusted or gone.
#include "calls.h"
#include "draft/evidence.h"
#include "draft/twins.h"
#include "histospec/engine.h"
#include "random_text.h"
#include "test.h"

using namespace histospec;
using testing::Random;

namespace {

const std::vector<Token> kPrompt = {1, 2, 3};
constexpr std::size_t kAlphabet = 5000;

// Text in which no context comes again.
std::vector<Token> noise(Random& random, std::size_t size) {
  std::vector<Token> out(size);
  for (Token& token : out) token = static_cast<Token>(random.below(kAlphabet));
  return out;
}

void ingest(Engine& engine, const std::vector<Token>& tokens, std::optional<std::int64_t> seed, std::int64_t epoch = 1,
            const std::vector<Token>& prompt = kPrompt) {
  testing::ingest(engine, "run", prompt, {tokens}, epoch, "", seed);
}

SessionId open(Engine& engine, std::optional<std::int64_t> seed, Tokens generated = {},
               const std::vector<Token>& prompt = kPrompt) {
  return engine.open("run", prompt, "", generated, seed).id;
}

std::vector<Token> step(Engine& engine, SessionId session, Tokens tokens, int max_tokens = 16, float cost = 0.01f) {
  return testing::step(engine, session, tokens, max_tokens, cost).tokens;
}

NamespaceStats stats(const Engine& engine) { return engine.stats().at("run"); }
SourceStats twin_stats(const Engine& engine) { return stats(engine).sources[kTwin]; }

// Has the session say all of `text` as far as its drafts go; returns the number of steps.
int say(Engine& engine, SessionId session, Tokens text, int max_tokens = 16, float cost = 0.05f) {
  std::vector<Token> draft = step(engine, session, {}, max_tokens, cost);
  int steps = 0;
  for (std::size_t said = 0; said < text.size(); ++steps) {
    const Tokens left = text.subspan(said);
    std::size_t came = 0;
    while (came < std::min(draft.size(), left.size()) && draft[came] == left[came]) ++came;
    came = std::min(came + 1, left.size());
    draft = step(engine, session, left.first(came), max_tokens, cost);
    said += came;
  }
  return steps;
}

}  // namespace

TEST_CASE("A session drafts its own twin, not those of other seeds") {
  Random random(1);
  Engine engine;
  std::vector<std::vector<Token>> said;
  for (std::int64_t seed = 0; seed < 8; ++seed) ingest(engine, said.emplace_back(noise(random, 300)), seed);
  for (std::int64_t seed = 0; seed < 8; ++seed) {
    const SessionId session = open(engine, seed);
    const std::vector<Token> draft = step(engine, session, {}, 64);
    CHECK(draft.size() > 30);
    CHECK(std::ranges::equal(draft, Tokens(said[seed]).first(draft.size())));
  }
  const NamespaceStats counted = stats(engine);
  CHECK_EQ(counted.twins_hit, 8u);
  CHECK_EQ(counted.twins_miss, 0u);
  CHECK_EQ(counted.sources[kTwin].draft_tokens, counted.draft_tokens);
  open(engine, 8);
  open(engine, {});
  CHECK_EQ(stats(engine).twins_miss, 1u);
  CHECK_EQ(stats(engine).twins_hit, 8u);
}

// History cannot do that: behind tokens that no response has, a twin goes on at the same position.
TEST_CASE("A twin is followed through divergences") {
  Random random(2);
  Engine engine;
  const std::vector<Token> said = noise(random, 4000);
  std::vector<Token> now = said;
  for (std::size_t i = 20; i < now.size(); i += 40) now[i] = static_cast<Token>(kAlphabet + i);
  ingest(engine, said, 7);
  const SessionId with = open(engine, 7), without = open(engine, {});
  const int steps = say(engine, with, now);
  CHECK(steps < 4000 / 10);
  CHECK(twin_stats(engine).accepted_tokens > 3000);
  say(engine, with, {});
  engine.close(with, false);
  CHECK(say(engine, without, now) > steps);
}

TEST_CASE("A twin is not drafted past its end") {
  Random random(3);
  Engine engine;
  const std::vector<Token> said = noise(random, 50);
  ingest(engine, said, 7);
  const SessionId session = open(engine, 7);
  const std::vector<Token> draft = step(engine, session, Tokens(said).first(40), 64);
  CHECK(std::ranges::equal(draft, Tokens(said).subspan(40)));
  CHECK(step(engine, session, Tokens(said).subspan(40), 64).empty());
  CHECK(step(engine, session, noise(random, 40), 64).size() < 64);
  engine.check_integrity();
}

// As without coupled sampling, where seeds mean nothing.
TEST_CASE("Twins that are wrong are soon not drafted") {
  Random random(4);
  Engine engine({.namespace_tokens = 0});
  std::uint64_t drafted = 0;
  for (int round = 0; round < 40; ++round) {
    const std::vector<Token> prompt = {4, static_cast<Token>(round)};
    ingest(engine, noise(random, 200), 7, 1, prompt);
    const SessionId session = open(engine, 7, {}, prompt);
    const std::uint64_t before = stats(engine).draft_tokens;
    say(engine, session, noise(random, 200));
    engine.close(session);
    drafted = stats(engine).draft_tokens - before;
  }
  CHECK_EQ(stats(engine).twins_hit, 40u);
  CHECK(drafted < 40);  // of 200 positions
}

TEST_CASE("A resumed session knows how far it agrees with its twin") {
  Random random(5);
  const std::vector<Token> said = noise(random, 300);
  std::vector<Token> now(said.begin(), said.begin() + 100);
  now[40] = static_cast<Token>(kAlphabet);
  Engine engine;
  ingest(engine, said, 7);
  const SessionId new_one = open(engine, 7), faithful = open(engine, 7, Tokens(said).first(100)),
                  diverged = open(engine, 7, now);
  const std::vector<SessionId> ids = {new_one, faithful, diverged};
  const std::vector<std::int64_t> offsets(4);
  StepResult result;
  engine.step({ids, {}, offsets, {}, 1, 0.0f}, result);
  CHECK_EQ(result.tokens, (std::vector<Token>{said[0], said[100], said[100]}));
  const TwinTrust trust;
  CHECK_EQ(result.probabilities,
           (std::vector<float>{trust.of({0, true}), trust.of({100, true}), trust.of({59, false})}));
}

TEST_CASE("A committed response is the next twin of its seed") {
  Random random(6);
  Engine engine;
  const std::vector<Token> first = noise(random, 100), second = noise(random, 100), third = noise(random, 100);
  ingest(engine, first, 7, 1);
  const auto commit = [&](const std::vector<Token>& text, std::int64_t epoch, bool really = true) {
    const SessionId session = open(engine, 7);
    step(engine, session, text, 0);
    engine.close(session, really, epoch);
    engine.check_integrity();
  };
  const auto twin = [&] { return step(engine, open(engine, 7), {}, 4, 0.0f).front(); };
  commit(second, 2);
  CHECK_EQ(twin(), second.front());
  commit(third, 1);  // older
  CHECK_EQ(twin(), second.front());
  commit(third, 3, false);  // not committed
  CHECK_EQ(twin(), second.front());
  commit(third, 3);
  CHECK_EQ(twin(), third.front());
}

// Turns of one trajectory have one seed, and begin at different positions.
TEST_CASE("A later turn has a twin of its own") {
  Random random(7);
  Engine engine;
  const std::vector<Token> answers[] = {noise(random, 30), noise(random, 40)};
  std::vector<Token> later = kPrompt;
  later.insert(later.end(), answers[0].begin(), answers[0].end());
  later.insert(later.end(), {9, 9, 9});
  for (int epoch : {1, 2}) {
    for (int turn : {0, 1}) {
      const SessionId session = open(engine, 7, {}, turn == 0 ? kPrompt : later);
      const std::vector<Token> draft = step(engine, session, {}, 8, 0.0f);
      if (epoch == 2) CHECK(std::ranges::equal(draft, Tokens(answers[turn]).first(8)));
      step(engine, session, answers[turn], 0);
      engine.close(session, true, epoch);
    }
  }
  CHECK_EQ(stats(engine).problems, 1u);
  CHECK_EQ(stats(engine).twins_hit, 2u);
}

TEST_CASE("A forgotten twin returns its memory at once, while a session runs") {
  Random random(8);
  const std::vector<Token> said = noise(random, 100'000);
  Engine engine;
  const std::size_t empty = engine.memory_bytes();
  ingest(engine, said, 7);
  const std::size_t with = engine.memory_bytes();
  const SessionId session = open(engine, 7);
  CHECK(!step(engine, session, Tokens(said).first(10)).empty());
  engine.drop_namespace("run");
  engine.check_integrity();
  CHECK(engine.memory_bytes() < empty + (with - empty) / 10);
  CHECK(step(engine, session, Tokens(said).subspan(10, 10)).empty());
  ingest(engine, said, 7, 2);  // for sessions to come
  CHECK(step(engine, session, noise(random, 3)).size() <= 16);
  engine.close(session);
  engine.check_integrity();
}

TEST_CASE("Twins are evicted before any history") {
  constexpr std::size_t kProblems = 30, kTokens = 20'000;
  const auto fill = [](Engine& engine, bool seeded) {
    Random random(9);
    for (std::size_t p = 0; p < kProblems; ++p) {
      const std::vector<Token> prompt = {static_cast<Token>(p)};
      ingest(engine, noise(random, kTokens), seeded ? std::optional<std::int64_t>(7) : std::nullopt, 1, prompt);
      engine.check_integrity();
    }
  };
  Engine plain({.namespace_tokens = 0}), ample({.namespace_tokens = 0});
  fill(plain, false);
  fill(ample, true);
  const std::size_t twins = ample.memory_bytes() - plain.memory_bytes();
  CHECK(twins >= kProblems * kTokens * sizeof(Token));
  CHECK(twins < kProblems * (kTokens * sizeof(Token) + 1000));
  const std::size_t budget = plain.memory_bytes() + twins / 3;
  Engine tight({.memory_bytes = budget, .namespace_tokens = 0});
  fill(tight, true);
  CHECK(tight.memory_bytes() <= budget);
  CHECK_EQ(stats(tight).history_responses, kProblems);
  // Those used last still have theirs.
  std::size_t first = kProblems;
  for (std::size_t p = kProblems; p-- > 0;) {
    const std::uint64_t before = stats(tight).twins_hit;
    open(tight, 7, {}, {static_cast<Token>(p)});
    if (stats(tight).twins_hit == before) break;
    first = p;
  }
  CHECK(first > kProblems / 2);
  CHECK(first < kProblems - 3);
}

TEST_CASE("Seeds of other problems change nothing") {
  const auto drafts = [](bool seeds) {
    Random random(10);
    Engine engine;
    const std::vector<Token> said = noise(random, 400), other = {5, 5};
    ingest(engine, said, {});
    ingest(engine, noise(random, 400), seeds ? std::optional<std::int64_t>(7) : std::nullopt, 1, other);
    std::vector<Token> now = said;
    for (std::size_t i = 9; i < now.size(); i += 20) now[i] = 1;
    const SessionId session = open(engine, {});
    std::vector<Token> all;
    for (std::size_t i = 0; i < now.size(); i += 3) {
      const std::vector<Token> draft = step(engine, session, Tokens(now).subspan(i, std::min<std::size_t>(3, 400 - i)));
      all.insert(all.end(), draft.begin(), draft.end());
      all.push_back(-1);
    }
    return all;
  };
  CHECK_EQ(drafts(true), drafts(false));
}
