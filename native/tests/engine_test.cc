// Cases that the model does not cover: budgets, other threads, and calls during other calls.
#include <atomic>
#include <numeric>
#include <thread>

#include "calls.h"
#include "live/live_text.h"
#include "random_text.h"
#include "test.h"
#include "upkeep/evictor.h"

using namespace histospec;
using testing::ingest;
using testing::Random;
using testing::step;

namespace {

std::uint64_t sum(const Engine& engine, std::uint64_t NamespaceStats::* field) {
  std::uint64_t total = 0;
  for (const auto& [name, stats] : engine.stats()) total += stats.*field;
  return total;
}

std::uint64_t evicted(const Engine& engine) {
  std::uint64_t total = 0;
  for (const auto& [name, stats] : engine.stats()) total += stats.evicted();
  return total;
}

}  // namespace

TEST_CASE("A session drafts what its sibling says, not what another problem or namespace says") {
  Engine engine;
  const std::vector<Token> prompt = {1, 2, 3};
  const SessionId a = engine.open("run", prompt).id, b = engine.open("run", prompt).id;
  const SessionId elsewhere = engine.open("other", prompt).id, other = engine.open("run", std::vector<Token>{9}).id;
  std::vector<Token> text;
  for (Token token = 100; token < 160; ++token) text.push_back(token);
  step(engine, a, text);
  CHECK(step(engine, b, std::vector<Token>{100, 101, 102}, 4, 0.001f).tokens.at(0) == 103);
  for (SessionId session : {elsewhere, other}) {
    CHECK(step(engine, session, std::vector<Token>{100, 101, 102}, 4, 0).tokens.empty());
  }
}

TEST_CASE("The first responses of a run draft for its other problems, and of later groups one") {
  Engine engine;
  Token next = 100;
  const auto new_text = [&](std::size_t tokens) {
    std::vector<Token> text(tokens);
    std::iota(text.begin(), text.end(), next);
    next += static_cast<Token>(tokens);
    return text;
  };
  const auto drafts = [&](const std::vector<Token>& text) {
    const SessionId session = engine.open("run", std::vector<Token>{0}).id;
    const auto drafted = step(engine, session, {text.begin(), text.begin() + 8}, 4, 0.001f).tokens;
    engine.close(session, false);
    return !drafted.empty() && drafted[0] == text[8];
  };
  const auto group = [&](std::size_t tokens) {
    const std::vector<std::vector<Token>> siblings = {new_text(tokens), new_text(tokens)};
    ingest(engine, "run", std::vector<Token>{siblings[0][0]}, siblings);
    return std::pair(drafts(siblings[0]), drafts(siblings[1]));
  };
  CHECK(group(300) == std::pair(true, true));
  for (int n = 0; n < 3; ++n) CHECK(group(5000).first);
  CHECK(group(5000) == std::pair(true, false));
}

TEST_CASE("An id names its problem whatever the prompt") {
  Engine engine;
  const std::vector<Token> one = {1}, two = {2};
  ingest(engine, "run", one, {{5, 6}}, 0, "id");
  CHECK_EQ(engine.history("run", two, "id").size(), 1u);
  CHECK_EQ(engine.history("run", one).size(), 0u);
}

TEST_CASE("The engine keeps a small budget, and its sessions survive") {
  Engine engine({.memory_bytes = 3 << 20, .namespace_tokens = 1 << 14});
  Random random(1);
  const std::vector<Token> mine = {1, 2, 3};
  const SessionId session = engine.open("run", mine).id;
  std::vector<Token> generated;
  std::uint64_t added = 0;
  for (int i = 0; i < 300; ++i) {
    const std::vector<Token> prompt = {static_cast<Token>(i % 100), 7};
    ingest(engine, "run", i % 10 == 0 ? mine : prompt, {random.text(2000, 50), random.text(2000, 50)}, i / 30);
    added += 2;
    const std::vector<Token> came = random.text(5, 50);
    step(engine, session, came);
    generated.insert(generated.end(), came.begin(), came.end());
    CHECK(engine.memory_bytes() <= std::size_t{3} << 20);
    CHECK_EQ(evicted(engine) + sum(engine, &NamespaceStats::history_responses), added);
  }
  CHECK(evicted(engine) > 0);
  CHECK(sum(engine, &NamespaceStats::history_responses) > 0);
  CHECK_EQ(engine.generated(session), generated);
  engine.check_integrity();
}

TEST_CASE("A tenant that fills memory evicts its own history, not that of a tenant within its share") {
  constexpr std::size_t kBudget = 2 << 20;
  Engine engine({.memory_bytes = kBudget, .namespace_tokens = 0});
  Random random(1);
  engine.assign("mine", "small");
  for (const char* name : {"theirs-0", "theirs-1", "theirs-2"}) engine.assign(name, "large");
  for (Token i = 0; i < 20; ++i) ingest(engine, "mine", std::vector{i}, {random.text(1000, 50)});
  const std::size_t mine = engine.tenants().at("small");
  for (Token i = 0; i < 600; ++i) {
    ingest(engine, "theirs-" + std::to_string(i % 3), std::vector{i}, {random.text(1000, 50)});
    CHECK(engine.memory_bytes() <= kBudget);
  }
  CHECK_EQ(engine.stats().at("mine").history_responses, 20u);
  CHECK_EQ(engine.tenants().at("small"), mine);
  CHECK(engine.tenants().at("large") > kBudget / 2);  // a tenant may take what others leave
  // The small tenant grows to its share at the cost of the large one, and then evicts its own history.
  for (Token i = 20; i < 600; ++i) ingest(engine, "mine", std::vector{i}, {random.text(1000, 50)});
  for (const char* name : {"small", "large"}) {
    CHECK(engine.tenants().at(name) > kBudget * 2 / 5);
    CHECK(engine.tenants().at(name) < kBudget * 3 / 5);
  }
  CHECK(engine.stats().at("mine").evicted_by_memory > 0);
  engine.check_integrity();
}

TEST_CASE("Eviction passes each problem in use once, in slices") {
  constexpr std::size_t kProblems = 20'000;
  Contents contents(0);
  Evictor evictor(0, contents);
  const Monitor::Lock lock(contents.monitor);
  const auto namespace_ = contents.registry.namespace_named("run");
  const auto problem = [&](Token token, bool used = true) REQUIRES(engine_lock) {
    return contents.registry.problem(*namespace_, ProblemKey("", std::vector{token}), used);
  };
  for (Token i = 0; i < Token{kProblems}; ++i) contents.change_live(*problem(i), [](const LiveText&) {});
  problem(kProblems);
  auto& [recent, busy, bare] = namespace_->tenant.shelves;
  evictor.relieve();
  CHECK(busy.size() > 0);
  CHECK(busy.size() < kProblems / 2);
  while (evictor.behind()) evictor.catch_up();
  CHECK_EQ(recent.size(), 0u);  // the one that is not in use was evicted
  CHECK_EQ(bare.size(), kProblems);
  problem(kProblems);
  evictor.relieve();
  CHECK(!evictor.behind());  // it does not pass the others again
  CHECK_EQ(recent.size(), 0u);
  for (Token i = 0; i < Token{kProblems}; ++i) contents.end_live(*problem(i, false));
  CHECK_EQ(recent.size(), kProblems);
  CHECK_EQ(busy.size() + bare.size(), 0u);
  contents.registry.check_integrity();
}

TEST_CASE("A tenant's own limit holds while memory is not short") {
  Engine engine({.namespace_tokens = 0});
  Random random(1);
  engine.assign("mine", "a");
  engine.limit_tenant("a", 1 << 18);
  for (Token i = 0; i < 200; ++i) {
    for (const char* name : {"mine", "other"}) ingest(engine, name, std::vector{i}, {random.text(1000, 50)});
    engine.wait_until_built();
    CHECK(engine.tenants().at("a") <= 1 << 18);
  }
  CHECK(engine.stats().at("mine").history_responses > 10);
  CHECK_EQ(engine.stats().at("other").evicted(), 0u);
  engine.limit_tenant("a", 0);
  engine.wait_until_built();
  CHECK_EQ(engine.stats().at("mine").history_responses, 0u);
  engine.check_integrity();
}

TEST_CASE("What leaves the index is counted by the limit that it was over") {
  const std::vector<Token> prompt = {1, 2, 3};
  Random random(1);
  const auto counted = [&](const EngineOptions& options, std::int64_t last_epoch) {
    Engine engine(options);
    for (std::int64_t i = 0; i < 40; ++i) {
      ingest(engine, "run", prompt, {random.text(1000, 50)}, std::min(i, last_epoch));
    }
    const NamespaceStats run = engine.stats().at("run");
    CHECK_EQ(run.evicted() + run.history_responses, 40u);
    // The budget alone makes a shard ask its store for what is gone.
    CHECK_EQ(engine.evicted(), run.evicted_by_memory > 0);
    return std::vector{run.evicted_by_memory > 0, run.evicted_by_epochs > 0, run.evicted_by_responses > 0};
  };
  CHECK_EQ(counted({.memory_bytes = 1 << 18, .namespace_tokens = 0}, 0), std::vector{true, false, false});
  CHECK_EQ(counted({.history_epochs = 3}, 39), std::vector{false, true, false});
  CHECK_EQ(counted({.history_responses = 3}, 0), std::vector{false, false, true});
  CHECK_EQ(counted({.history_epochs = 3, .history_responses = 3}, 20), std::vector{false, true, true});
  CHECK_EQ(counted({}, 5), std::vector{false, false, false});
}

TEST_CASE("What is dropped is not evicted") {
  Engine engine;
  ingest(engine, "run", std::vector<Token>{1, 2}, {{3, 4, 5}});
  engine.drop_namespace("run", true);
  CHECK_EQ(evicted(engine), 0u);
}

TEST_CASE("An engine whose budget holds nothing still runs") {
  Engine engine({.memory_bytes = 1, .history_epochs = 1, .namespace_tokens = 0});
  const std::vector<Token> prompt = {1, 2};
  for (int i = 0; i < 20; ++i) {
    ingest(engine, "run", prompt, {{3, 4, 5, 3, 4, 5}});
    const SessionId session = engine.open("run", prompt).id;
    step(engine, session, std::vector<Token>{3, 4, 5, 3, 4, 5, 3});
    engine.close(session);
    engine.wait_until_built();
    engine.check_integrity();
  }
  CHECK_EQ(sum(engine, &NamespaceStats::history_responses), 0u);
  CHECK_EQ(evicted(engine), 40u);
}

TEST_CASE("Without a namespace index, no text is kept for one") {
  Engine engine({.history_epochs = 1, .namespace_tokens = 0});
  const std::vector<Token> prompt = {1, 2};
  Random random(1);
  ingest(engine, "run", prompt, {random.text(5000, 9)}, 1);
  const std::size_t once = engine.memory_bytes();
  for (std::int64_t epoch = 2; epoch < 60; ++epoch) ingest(engine, "run", prompt, {random.text(5000, 9)}, epoch);
  CHECK(engine.memory_bytes() < 2 * once);
}

TEST_CASE("A dropped namespace is forgotten, and its sessions go on") {
  Engine engine;
  const std::vector<Token> prompt = {1, 2, 3};
  std::vector<Token> secret;
  for (Token token = 1000; token < 11000; ++token) secret.push_back(token);
  ingest(engine, "run", prompt, {secret}, 5);
  const SessionId session = engine.open("run", prompt).id;
  CHECK(!step(engine, session, std::vector<Token>{1000, 1001, 1002}, 16, 0).tokens.empty());
  CHECK_EQ(engine.drop_namespace("run"), 1u);
  CHECK_EQ(engine.stats().at("run").newest_epoch, 0);
  CHECK_EQ(engine.history("run", prompt).size(), 0u);
  for (Token token : step(engine, session, std::vector<Token>{1003, 1004, 1005}, 16, 0).tokens) CHECK(token <= 1005);
  const std::vector<Token> other = {9, 9};
  const SessionId later = engine.open("run", other).id;
  CHECK_EQ(step(engine, later, std::vector<Token>{1000, 1001, 1002}, 16, 0).tokens.size(), 0u);
  engine.close(session);
  engine.close(later, false);
  engine.wait_until_built();
  CHECK_EQ(engine.history("run", prompt).size(), 1u);
  engine.check_integrity();
}

TEST_CASE("A namespace can be dropped while sessions run and segments are built") {
  Engine engine;
  Random random(3);
  for (int round = 0; round < 40; ++round) {
    const std::vector<Token> prompt = {1, 2, static_cast<Token>(round % 3)};
    std::vector<SessionId> sessions;
    for (int i = 0; i < 4; ++i) sessions.push_back(engine.open("run", prompt).id);
    for (SessionId session : sessions) step(engine, session, random.text(3000, 20));
    for (int i = 0; i < 3; ++i) engine.close(sessions[i]);
    if (round % 2 == 0) engine.close(sessions[3]);
    engine.drop_namespace("run");  // while the builder holds its copy, or before, or after
    if (round % 2 == 1) engine.close(sessions[3]);
    engine.wait_until_built();
    CHECK_EQ(engine.history("run", prompt).size(), round % 2 == 1 ? 1u : 0u);
    engine.drop_namespace("run");
    engine.check_integrity();
    CHECK_EQ(sum(engine, &NamespaceStats::problems), 0u);
  }
}

// Meanwhile a new session keeps the live text.
TEST_CASE("A drop forgets responses that still wait for the builder") {
  Engine engine;
  const std::vector<Token> prompt = {1, 2, 3};
  SessionId session = engine.open("run", prompt).id;
  for (int round = 0; round < 500; ++round) {
    step(engine, session, std::vector<Token>{4, 5, 6, 7});
    engine.close(session);
    session = engine.open("run", prompt).id;
    CHECK_EQ(engine.drop_namespace("run"), 1u);
    CHECK_EQ(engine.history("run", prompt).size(), 0u);
  }
  engine.close(session);
  engine.wait_until_built();
  engine.check_integrity();
}

// So each response that was added is held, or was counted as dropped.
TEST_CASE("An ingest beside a drop comes before it or after it") {
  for (int round = 0; round < 12; ++round) {
    CAPTURE(round);
    Engine engine;
    std::atomic<std::uint64_t> added{0}, dropped{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 2; ++t) {
      threads.emplace_back([&, t] {
        Random random(static_cast<std::uint64_t>(round * 10 + t));
        for (int i = 0; i < 30; ++i) {
          ingest(engine, "run", std::vector<Token>{static_cast<Token>(t)}, {random.text(300, 9)}, i / 20);
          ++added;
        }
      });
    }
    threads.emplace_back([&] {
      for (int i = 0; i < 60; ++i) dropped += engine.drop_namespace("run");
    });
    for (std::thread& thread : threads) thread.join();
    engine.check_integrity();
    CHECK_EQ(dropped + sum(engine, &NamespaceStats::history_responses), added.load());
  }
}

TEST_CASE("Responses of a long group become segments while it runs") {
  Engine engine;
  const std::vector<Token> prompt = {1, 2, 3};
  Random random(4);
  const SessionId stays = engine.open("run", prompt).id;
  for (int i = 0; i < 6; ++i) {
    const SessionId session = engine.open("run", prompt).id;
    step(engine, session, random.text(30000, 100));
    engine.close(session, true, i);
  }
  engine.wait_until_built();
  const std::vector<Response> history = engine.history("run", prompt);
  CHECK_EQ(history.size(), 6u);
  for (std::size_t i = 0; i < 6; ++i) CHECK_EQ(history[i].epoch, static_cast<std::int64_t>(i));
  step(engine, stays, std::vector<Token>{1, 2, 3});
  engine.check_integrity();
}

TEST_CASE("An engine can be destroyed while sessions run and segments are built") {
  for (int round = 0; round < 20; ++round) {
    Engine engine;
    Random random(static_cast<std::uint64_t>(round));
    for (Token p = 0; p < 5; ++p) {
      const SessionId session = engine.open("run", std::vector<Token>{p}).id;
      step(engine, session, random.text(3000, 30));
      if (p > 0) engine.close(session);
    }
  }
}

TEST_CASE("Options out of range are rejected") {
  CHECK_THROWS_AS(Engine({.memory_bytes = 0}), std::invalid_argument);
  CHECK_THROWS_AS(Engine({.history_epochs = 0}), std::invalid_argument);
  CHECK_THROWS_AS(Engine({.threads = 0}), std::invalid_argument);
  CHECK_THROWS_AS(Engine({.threads = -1}), std::invalid_argument);
  CHECK_THROWS_AS(Engine({.threads = kMaxThreads + 1}), std::invalid_argument);
  Engine engine({.threads = kMaxThreads});
  CHECK(step(engine, engine.open("run", std::vector<Token>{1}).id, {}).tokens.empty());
}

TEST_CASE("Namespaces come and go, and no bytes stay booked") {
  Engine engine({.memory_bytes = 1 << 22});
  Random random(3);
  for (int round = 0; round < 3; ++round) {
    for (int n = 0; n < 300; ++n) {
      const std::string name = "run-" + std::to_string(n);
      ingest(engine, name, std::vector<Token>{1, 2}, {random.text(40, 20), random.text(40, 20)});
      const SessionId session = engine.open(name, std::vector<Token>{1, 2}).id;
      step(engine, session, random.text(5, 20));
      step(engine, session, random.text(5, 20));
      engine.close(session, n % 2 == 0);
      if (n % 3 == 0) engine.drop_namespace(name);
    }
    engine.wait_until_built();
    engine.check_integrity();
  }
  for (int n = 0; n < 300; ++n) engine.drop_namespace("run-" + std::to_string(n));
  engine.check_integrity();
  CHECK_EQ(engine.memory_bytes(), 0);
}

std::uint64_t turns(const Engine& engine) {
  const LockTimes times = engine.lock_times();
  return std::accumulate(times.counts.begin(), times.counts.end(), std::uint64_t{0});
}

TEST_CASE("Long calls release the lock after each slice of work") {
  const auto turns_during = [](Engine& engine, auto call) {
    const std::uint64_t before = turns(engine);
    call();
    return turns(engine) - before;
  };
  Random random(1);
  Engine engine({.namespace_tokens = 0});
  const std::vector<Token> prompt = random.text(1 << 20, 50'000);
  CHECK(turns_during(engine, [&] { engine.open("run", prompt); }) >= (1 << 20) / LiveText::kSlice - 1);
  const std::vector<Token> short_prompt = {1};
  CHECK(turns_during(engine, [&] { engine.open("run", short_prompt, "", prompt); }) >=
        (1 << 20) / LiveText::kSlice - 1);
  for (Token p = 0; p < 20'000; ++p) ingest(engine, "drop", std::vector<Token>{p, p + 1}, {{1, 2, 3}});
  CHECK(turns_during(engine, [&] { CHECK_EQ(engine.drop_namespace("drop"), 20'000u); }) >= 20'000 / 256 - 1);
  CHECK(!engine.stats().contains("drop"));
  engine.check_integrity();
}

TEST_CASE("Responses that are committed during a drop stay or go, never half") {
  Engine engine({.namespace_tokens = 1 << 12});
  for (Token p = 0; p < 3000; ++p) ingest(engine, "run", std::vector<Token>{p}, {{1, 2, 3}});
  std::atomic<bool> over = false;
  std::thread other([&] {
    Random random(2);
    for (Token p = 0; !over; ++p) {
      const std::vector<Token> prompt = {p % 4000};
      const SessionId session = engine.open("run", prompt).id;
      step(engine, session, random.text(20, 9));
      engine.close(session, !random.one_in(4));
      ingest(engine, "run", prompt, {{4, 5, 6}});
    }
  });
  for (int round = 0; round < 20; ++round) {
    engine.drop_namespace("run");
    for (Token p = 0; p < 1000; ++p) ingest(engine, "run", std::vector<Token>{p}, {{1, 2, 3}});
  }
  over = true;
  other.join();
  engine.wait_until_built();
  engine.check_integrity();
  engine.drop_namespace("run");
  engine.wait_until_built();
  CHECK(engine.stats().empty());
  CHECK_EQ(engine.memory_bytes(), Engine().memory_bytes());
}

TEST_CASE("Committing faster than segments are built makes the engine congested, within its budget") {
  constexpr std::size_t kBudget = 32 << 20;
  Engine engine({.memory_bytes = kBudget, .history_epochs = 1, .namespace_tokens = 0});
  Random random(3);
  const std::vector<Token> prompt = {1, 2}, text = random.text(20'000, 50'000);
  const SessionId running = engine.open("run", prompt).id;  // so that no group ever ends
  std::size_t waited = 0;
  for (int i = 0; i < 300; ++i) {
    for (; engine.congested(); ++waited) std::this_thread::yield();
    const SessionId session = engine.open("run", prompt).id;
    step(engine, session, text);
    engine.close(session, true, i);
    CHECK(engine.memory_bytes() < kBudget + kBudget / 10);
  }
  CHECK(waited > 0);
  engine.close(running, false);
  engine.wait_until_built();
  CHECK(!engine.congested());
  CHECK(sum(engine, &NamespaceStats::history_responses) > 0);
  engine.check_integrity();
}

TEST_CASE("A dropped session returns its memory while its group runs") {
  Engine engine({.namespace_tokens = 0});
  Random random(4);
  const std::vector<Token> prompt = {1, 2};
  const SessionId running = engine.open("run", prompt).id;
  std::size_t after_first = 0;
  for (int round = 0; round < 20; ++round) {
    const SessionId session = engine.open("run", prompt).id;
    step(engine, session, random.text(100'000, 1000));
    engine.close(session, false);
    engine.wait_until_built();
    if (round == 0) after_first = engine.memory_bytes();
  }
  CHECK(engine.memory_bytes() < 2 * after_first);
  CHECK_EQ(engine.lengths(std::span(&running, 1))[0], 0);
  engine.check_integrity();
}

TEST_CASE("The engine counts how long its lock is held") {
  Engine engine;
  const LockTimes before = engine.lock_times();
  const std::uint64_t turns_before = turns(engine);
  for (int i = 0; i < 100; ++i) engine.memory_bytes();
  CHECK(turns(engine) >= turns_before + 100);
  const LockTimes after = engine.lock_times();
  CHECK(after.seconds >= before.seconds);
  CHECK(after.longest > 0);
}
