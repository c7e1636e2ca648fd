// Prompts chosen so that finding their problem is expensive.
#include <map>
#include <numeric>
#include <set>
#include <string_view>

#include "calls.h"
#include "hash/keyed.h"
#include "random_text.h"
#include "registry/problem.h"
#include "test.h"

using namespace histospec;

namespace {

using Prompt = std::vector<Token>;

std::uint64_t without_key(std::uint64_t hash, std::uint64_t token) {
  hash = (hash ^ token) * 0x9E3779B97F4A7C15u;
  return hash ^ hash >> 29;
}

// Two prompts of two tokens each, then a third one that makes both hashes equal: so many blocks one after another yield
// 2^blocks prompts of one hash. `next` is the hash of a prompt with one more token.
template <typename Next>
std::pair<Prompt, Prompt> block(testing::Random& random, std::uint64_t& hash, Next next) {
  const auto of = [&](const Prompt& tokens) {
    std::uint64_t all = hash;
    for (const Token token : tokens) all = next(all, static_cast<std::uint32_t>(token));
    return all;
  };
  std::map<std::uint64_t, Prompt> seen;  // by the upper 33 bits of the hash
  while (true) {
    const Prompt some = {static_cast<Token>(random.below(1u << 31)), static_cast<Token>(random.below(1u << 31))};
    const std::uint64_t mine = of(some);
    const auto [other, fresh] = seen.try_emplace(mine >> 31, some);
    if (fresh || other->second == some) continue;
    Prompt a = some, b = other->second;
    a.push_back(1);
    b.push_back(static_cast<Token>(1 ^ mine ^ of(b)));
    hash = next(mine, 1);
    return {a, b};
  }
}

}  // namespace

TEST_CASE("Prompts of one hash without a key have hashes of their own") {
  testing::Random random(1);
  std::uint64_t hash = 0;
  std::vector<std::pair<Prompt, Prompt>> blocks;
  for (int i = 0; i < 4; ++i) blocks.push_back(block(random, hash, without_key));
  std::set<std::uint64_t> hashes;
  for (unsigned n = 0; n < 16; ++n) {
    Prompt prompt;
    std::uint64_t same = 0;
    for (unsigned i = 0; i < 4; ++i) {
      const Prompt& some = n >> i & 1 ? blocks[i].second : blocks[i].first;
      prompt.insert(prompt.end(), some.begin(), some.end());
    }
    for (const Token token : prompt) same = without_key(same, static_cast<std::uint32_t>(token));
    REQUIRE_EQ(same, hash);
    hashes.insert(ProblemKey("", prompt).hash);
  }
  CHECK_EQ(hashes.size(), 16u);
}

TEST_CASE("Two processes place the same prompt under different keys") {
  const Prompt prompt = {1, 2, 3};
  CHECK(HashKey::random().of(prompt) != HashKey::random().of(prompt));
  CHECK(hash_key.of(std::string_view("problem")) != HashKey::random().of(std::string_view("problem")));
}

TEST_CASE("A later turn is found below prompts that no response goes on from") {
  Engine engine;
  const auto first = [](Token n) {
    Prompt prompt(static_cast<std::size_t>(n));
    std::iota(prompt.begin(), prompt.end(), 10);
    return prompt;
  };
  testing::ingest(engine, "run", first(100), {{110, 111, 112, 113, 114}});
  for (Token n = 101; n < 130; ++n) testing::ingest(engine, "run", first(n), {{2, 2}});
  CHECK_EQ(engine.open("run", first(60000)).prompt_length, 100u);  // more than a slice
  testing::ingest(engine, "run", first(110), {{120, 121, 122, 123, 124}});
  CHECK_EQ(engine.open("run", first(60001)).prompt_length, 110u);
  for (Token n = 130; n < 200; ++n) testing::ingest(engine, "run", first(n), {{2, 2}});
  CHECK_EQ(engine.open("run", first(60002)).prompt_length, 60002u);  // only the longest prompts are examined
  engine.check_integrity();
}

TEST_CASE("Problems whose prompts have the same hash are apart") {
  testing::Random random(2);
  std::uint64_t hash = hash_key.start;
  const auto [one, other] =
      block(random, hash, [](std::uint64_t before, std::uint64_t token) { return hash_key.next(before, token); });
  REQUIRE(one != other);
  REQUIRE_EQ(ProblemKey("", one).hash, ProblemKey("", other).hash);
  Engine engine;
  testing::ingest(engine, "run", one, {{100, 101, 102, 103}});
  CHECK(engine.history("run", other).empty());
  testing::ingest(engine, "run", other, {{100, 101, 202, 203}});
  CHECK_EQ(engine.history("run", one).at(0).tokens, Prompt{100, 101, 102, 103});
  CHECK_EQ(engine.history("run", other).at(0).tokens, Prompt{100, 101, 202, 203});
  for (const auto& [prompt, next] : {std::pair(one, 102), std::pair(other, 202)}) {
    const Opened opened = engine.open("run", prompt, {}, Prompt{100, 101});
    CHECK_EQ(testing::step(engine, opened.id, {}).tokens.at(0), next);
  }
  // Sessions of the two problems are not siblings.
  const SessionId writer = engine.open("run", one).id;
  const SessionId reader = engine.open("run", other, {}, Prompt{7, 8}).id;
  testing::step(engine, writer, Prompt{7, 8, 9, 10, 11});
  CHECK(testing::step(engine, reader, {}, 16, 0.0f).tokens.empty());
  // Nor does a namespace with the one share the other.
  testing::ingest(engine, "one", one, {{7}});
  testing::ingest(engine, "other", other, {{7}});
  const auto shared = engine.shared_prompts("one").namespaces;
  CHECK_EQ(shared.size(), 1u);
  CHECK_EQ(shared.at(0).first, "run");
  engine.check_integrity();
}
