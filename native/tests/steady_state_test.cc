// A step allocates memory only for the growth of live text; it reuses all other memory.
#include <algorithm>
#include <bit>
#include <numeric>

#include "allocations.h"
#include "histospec/engine.h"
#include "random_text.h"
#include "test.h"

using namespace histospec;
using testing::Random;

namespace {

constexpr std::size_t kProblems = 6, kGroup = 12, kSessions = kProblems * kGroup;
constexpr std::size_t kText = 8192;  // generated tokens of a session, at most
constexpr std::size_t kPiece = 4;    // tokens of a session and step

// Problems with a history, and groups that say much the same; by twos, with a seed and without.
struct Rollout {
  explicit Rollout(int threads) : engine({.threads = threads}) {
    Random random(1);
    for (std::size_t p = 0; p < kProblems; ++p) {
      const std::vector<Token> prompt = {static_cast<Token>(p), 1, 2};
      const std::vector<Token> said = random.text(kText, 300);
      const std::vector<ResponseView> views = {{{}, said, {}, 0, 7}};
      engine.ingest("run", prompt, views);
      for (std::size_t i = 0; i < kGroup; ++i) {
        ids.push_back(
            engine.open("run", prompt, "", {}, i % 2 == 0 ? std::optional<std::int64_t>(7) : std::nullopt).id);
        texts.push_back(said);
        for (Token& token : texts.back()) token = random.one_in(30) ? static_cast<Token>(random.below(300)) : token;
      }
    }
    engine.wait_until_built();
    tokens.reserve(kSessions * kPiece);
    offsets.reserve(kSessions + 1);
  }

  // `size`: tokens that each session generated.
  void step(std::size_t size) {
    tokens.clear();
    offsets.assign(1, 0);
    for (const auto& text : texts) {
      tokens.insert(tokens.end(), text.begin() + said, text.begin() + said + static_cast<std::ptrdiff_t>(size));
      offsets.push_back(static_cast<std::int64_t>(tokens.size()));
    }
    said += static_cast<std::ptrdiff_t>(size);
    engine.step({ids, tokens, offsets, {}, 16, 0.0f}, result);
  }

  Engine engine;
  std::vector<SessionId> ids;
  std::vector<std::vector<Token>> texts;
  std::ptrdiff_t said = 0;
  std::vector<Token> tokens;
  std::vector<std::int64_t> offsets;
  StepResult result;
};

}  // namespace

TEST_CASE("A step without tokens allocates nothing") {
  for (int threads : {1, 3}) {
    CAPTURE(threads);
    Rollout rollout(threads);
    for (int i = 0; i < 50; ++i) rollout.step(kPiece);
    for (int i = 0; i < 3; ++i) rollout.step(0);
    CHECK(!rollout.result.tokens.empty());
    // A thread that comes to its first session late makes room for what it looks at, once.
    std::size_t made = 1;
    for (int tries = threads == 1 ? 1 : 20; made > 0 && tries > 0; --tries) {
      const std::size_t before = allocations::made(), held = allocations::held();
      for (int i = 0; i < 20; ++i) rollout.step(0);
      made = allocations::made() - before;
      if (made == 0) CHECK_EQ(allocations::held(), held);
    }
    CHECK_EQ(made, 0u);
  }
}

TEST_CASE("A step allocates only what live text grows by") {
  for (int threads : {1, 3}) {
    CAPTURE(threads);
    Rollout rollout(threads);
    for (std::size_t said = 0; said < 256; said += kPiece) rollout.step(kPiece);
    const std::size_t before = allocations::made();
    std::size_t quiet = 0, steps = 0;
    for (std::size_t said = 256; said < kText; said += kPiece, ++steps) {
      const std::size_t made = allocations::made();
      rollout.step(kPiece);
      quiet += allocations::made() == made;
    }
    // From 256 to 8,192 tokens each array of a session doubles five times, and so does the table of a problem; one
    // more for where they started. Two arrays a session, its tokens and their links; drafts have their largest size
    // already, or grow to it.
    constexpr std::size_t kDoublings = 5 + 1, kDrafts = 4 * std::bit_width(16u);
    const std::size_t made = allocations::made() - before;
    INFO(made, " allocations, ", quiet, " of ", steps, " steps without");
    CHECK(made <= kSessions * (2 * kDoublings + kDrafts) + kProblems * kDoublings);
    CHECK(quiet > steps * 3 / 4);
  }
}

TEST_CASE("Sessions that generate in step do not grow in the same step") {
  Engine engine({.threads = 1});
  constexpr std::size_t kOpen = 512, kLength = 4096;
  std::vector<SessionId> ids;
  for (std::size_t i = 0; i < kOpen; ++i) {  // half of them siblings, half of a problem of their own
    const std::vector<Token> prompt = {static_cast<Token>(std::max(i, kOpen / 2)), 1, 2};
    ids.push_back(engine.open("run", prompt, "", {}, std::nullopt).id);
  }
  const std::vector<Token> tokens(kOpen, 7);
  std::vector<std::int64_t> offsets(kOpen + 1);
  std::iota(offsets.begin(), offsets.end(), 0);
  StepResult result;
  std::size_t most = 0, all = 0;
  for (std::size_t said = 0; said < kLength; ++said) {
    const std::size_t before = allocations::held();
    engine.step({ids, tokens, offsets, {}, 0, 0.0f}, result);
    const std::size_t grew = std::max(allocations::held(), before) - before;
    most = std::max(most, grew);
    all += grew;
  }
  CHECK(all > kOpen * kLength * 12);
  CHECK(most < all / 64);
}
