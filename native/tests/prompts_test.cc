// Prompts chosen so that finding their problem is expensive.
#include <map>
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

// Two tokens each, then a third one that makes both hashes equal: 2^blocks prompts of one hash from so many blocks.
std::pair<Prompt, Prompt> block(testing::Random& random, std::uint64_t& hash) {
  std::map<std::uint64_t, Prompt> seen;  // by the upper half
  while (true) {
    const Prompt some = {static_cast<Token>(random.below(1u << 31)), static_cast<Token>(random.below(1u << 31))};
    std::uint64_t mine = hash;
    for (const Token token : some) mine = without_key(mine, static_cast<std::uint32_t>(token));
    const auto [other, fresh] = seen.try_emplace(mine >> 31, some);
    if (fresh || other->second == some) continue;
    std::uint64_t its = hash;
    for (const Token token : other->second) its = without_key(its, static_cast<std::uint32_t>(token));
    Prompt a = some, b = other->second;
    a.push_back(1);
    b.push_back(static_cast<Token>(1 ^ mine ^ its));
    hash = without_key(mine, 1);
    return {a, b};
  }
}

}  // namespace

TEST_CASE("Prompts of one hash without a key have hashes of their own") {
  testing::Random random(1);
  std::uint64_t hash = 0;
  std::vector<std::pair<Prompt, Prompt>> blocks;
  for (int i = 0; i < 4; ++i) blocks.push_back(block(random, hash));
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
  const Prompt turn(3000, 1);
  const auto first = [&turn](std::size_t n) { return Prompt(turn.begin(), turn.begin() + static_cast<long>(n)); };
  testing::ingest(engine, "run", first(100), {{1, 1, 1, 1, 1}}, 0);
  for (std::size_t n = 101; n < 130; ++n) testing::ingest(engine, "run", first(n), {{2, 2}}, 0);
  CHECK_EQ(engine.open("run", turn).prompt_length, 100u);
  testing::ingest(engine, "run", first(110), {{1, 1, 1, 1, 1}}, 0);
  CHECK_EQ(engine.open("run", Prompt(3001, 1)).prompt_length, 110u);
  engine.check_integrity();
}

TEST_CASE("Only the longest of many nested prompts are examined") {
  Engine engine;
  const Prompt turn(3000, 1);
  testing::ingest(engine, "run", Prompt{1}, {{1, 1, 1, 1, 1}}, 0);
  for (long n = 2; n < 1000; ++n) testing::ingest(engine, "run", Prompt(turn.begin(), turn.begin() + n), {{2, 2}}, 0);
  CHECK_EQ(engine.open("run", turn).prompt_length, turn.size());
}
