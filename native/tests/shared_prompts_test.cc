// Prompts that a namespace shares with others.
#include <atomic>
#include <map>
#include <thread>

#include "calls.h"
#include "test.h"

using namespace histospec;

namespace {

using Counts = std::map<std::string, std::size_t>;

void ingest(Engine& engine, const std::string& name, const std::vector<Token>& prompt, const std::string& id = {}) {
  testing::ingest(engine, name, prompt, {{7, 8, 9}}, 0, id);
}

Counts counts(const SharedPrompts& shared) { return {shared.namespaces.begin(), shared.namespaces.end()}; }

std::vector<Token> prompt(Token number) { return {1, number, 3}; }

}  // namespace

TEST_CASE("Namespaces share the prompts that both have, token by token") {
  Engine engine;
  for (Token i = 0; i < 10; ++i) ingest(engine, "run", prompt(i));
  for (Token i = 4; i < 20; ++i) ingest(engine, "other", prompt(i));
  ingest(engine, "one", prompt(9));
  ingest(engine, "none", {1, 9});
  ingest(engine, "none", {1, 9, 3, 4});
  const SharedPrompts shared = engine.shared_prompts("run");
  CHECK(shared.asked == 10);
  CHECK(counts(shared) == Counts{{"other", 6}, {"one", 1}});
  CHECK(engine.shared_prompts("other").asked == 16);
  CHECK(counts(engine.shared_prompts("one")) == Counts{{"run", 1}, {"other", 1}});
  CHECK(engine.shared_prompts("none").namespaces.empty());
  CHECK(engine.shared_prompts("absent").asked == 0);
}

TEST_CASE("The prompts that came last are asked about, as many as wanted") {
  Engine engine;
  for (Token i = 0; i < 100; ++i) ingest(engine, "run", prompt(i));
  for (Token i = 0; i < 95; ++i) ingest(engine, "other", prompt(i));
  CHECK(engine.shared_prompts("run").asked == 64);
  CHECK(counts(engine.shared_prompts("run")) == Counts{{"other", 59}});
  CHECK(engine.shared_prompts("run", 10).asked == 10);
  CHECK(counts(engine.shared_prompts("run", 10)) == Counts{{"other", 5}});
  CHECK(engine.shared_prompts("run", 0).namespaces.empty());
}

TEST_CASE("Only finished responses count, and only problems that their prompt names") {
  Engine engine;
  ingest(engine, "run", prompt(1));
  const SessionId session = engine.open("other", prompt(1)).id;
  CHECK(engine.shared_prompts("run").namespaces.empty());
  CHECK(counts(engine.shared_prompts("other")) == Counts{{"run", 1}});  // a session is enough to ask
  testing::step(engine, session, std::vector<Token>{5}, 0);
  engine.close(session);
  CHECK(counts(engine.shared_prompts("run")) == Counts{{"other", 1}});
  ingest(engine, "named", prompt(1), "task-1");
  ingest(engine, "named too", prompt(1), "task-1");
  CHECK(engine.shared_prompts("named").asked == 0);
  CHECK(counts(engine.shared_prompts("run")) == Counts{{"other", 1}});
}

TEST_CASE("A namespace that shares all is found among thousands") {
  Engine engine;
  for (int other = 0; other < 4000; ++other) ingest(engine, "run-" + std::to_string(other), prompt(100 + other));
  for (Token i = 0; i < 64; ++i) {
    ingest(engine, "train", prompt(i));
    ingest(engine, "trian", prompt(i));
  }
  const SharedPrompts shared = engine.shared_prompts("trian");
  CHECK(shared.asked == 64);
  CHECK(counts(shared) == Counts{{"train", 64}});
}

TEST_CASE("Namespaces may be dropped and grow meanwhile") {
  Engine engine;
  const auto fill = [&](const std::string& name) {
    for (Token i = 0; i < 64; ++i) ingest(engine, name, prompt(i));
  };
  for (const char* name : {"asked", "steady"}) fill(name);
  for (int other = 0; other < 10; ++other) fill("run-" + std::to_string(other));
  std::atomic<bool> stop = false;
  std::thread changing([&] {
    for (int round = 0; !stop; ++round) {
      const std::string name = "run-" + std::to_string(round % 10);
      engine.drop_namespace(name);
      fill(name);
    }
  });
  bool found = true;
  for (int round = 0; round < 50; ++round) {
    const SharedPrompts shared = engine.shared_prompts("asked");
    const Counts known = counts(shared);
    found = found && shared.asked == 64 && known.contains("steady") && known.at("steady") == 64;
    for (const auto& [name, prompts] : known) found = found && prompts <= 64;
  }
  stop = true;
  changing.join();
  CHECK(found);
  engine.check_integrity();
}
