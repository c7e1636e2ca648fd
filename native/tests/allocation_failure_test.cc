// Lets each allocation of a call fail in turn: the call either throws std::bad_alloc and changes nothing, or succeeds.
#include "allocations.h"
#include "histospec/engine.h"
#include "index/segments.h"
#include "random_text.h"
#include "test.h"

using namespace histospec;
using testing::Random;

namespace {

// Calls `action` with its n-th allocation failing, for n = 0, 1, … until it succeeds. Calls `check` after each failure.
template <typename Action, typename Check, typename Done>
void fail_each_allocation(Action action, Check after_failure, Done after_success) {
  for (long n = 0; n < 100000; ++n) {
    INFO("allocation ", n);
    bool failed = false, happened = false;
    {
      allocations::Failure failure(n);
      try {
        action();
      } catch (const std::bad_alloc&) {
        failed = true;
      }
      happened = failure.happened();
    }
    if (!happened) return;
    // Some allocations are optional: std::vector::shrink_to_fit, and the namespace index.
    if (failed) {
      after_failure();
    } else {
      after_success();
    }
  }
  FAIL("the action still allocates");
}

// The state that a failed call must not change. It may leave an empty problem or namespace, which is evicted later.
std::vector<std::uint64_t> stats_of(const Engine& engine) {
  std::vector<std::uint64_t> sums(9);
  for (const auto& [name, s] : engine.stats()) {
    const std::uint64_t all[] = {s.lookups_hit,       s.lookups_miss,   s.drafts_hit + s.drafts_empty,
                                 s.generated_tokens,  s.evicted(),      s.sessions,
                                 s.history_responses, s.history_tokens, static_cast<std::uint64_t>(s.newest_epoch)};
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += all[i];
  }
  return sums;
}

const std::vector<Token> kPrompt = {1, 2, 3};

}  // namespace

TEST_CASE("Building a segment without memory leaks nothing, and a segment knows its size") {
  Random random(1);
  const std::vector<Token> a = random.text(300, 5), b = random.text(100, 70);
  const std::vector<std::uint8_t> mask(100, 0);
  const std::vector<ResponseView> views = {{kPrompt, a, {}, 1}, {kPrompt, b, mask, 2}};
  const std::size_t before = allocations::held();
  std::shared_ptr<const Segment> segment;
  fail_each_allocation([&] { segment = Segment::build(views); }, [&] { CHECK_EQ(allocations::held(), before); },
                       [&] { segment.reset(); });
  segment->check_integrity();
  // And while we are here: what it says it holds is what it holds.
  const std::size_t real = allocations::held() - before;
  CHECK(segment->bytes() >= real);
  CHECK(segment->bytes() <= real + 400);
  fail_each_allocation([&] { CHECK_EQ(segment->responses().size(), 2u); },
                       [&] { CHECK_EQ(allocations::held(), before + real); }, [] {});
}

TEST_CASE("Ingesting without memory changes nothing") {
  Random random(2);
  Engine engine({.history_epochs = 2, .namespace_tokens = 4500});
  for (int i = 0; i < 12; ++i) {
    // New namespaces, new problems, merges, evictions by the window, and merges of the namespace's index.
    const std::string name = i % 4 == 3 ? "a namespace with a name too long for its string" : "run";
    const std::vector<Token> prompt = {1, static_cast<Token>(i % 3)};
    const std::vector<Token> tokens = random.text(60 * static_cast<std::size_t>(i), 20);
    const std::vector<ResponseView> views = {{{}, tokens, {}, i / 4, i % 2}, {{}, kPrompt, {}, i / 4, 7}};
    auto before = stats_of(engine);
    fail_each_allocation([&] { engine.ingest(name, prompt, views); },
                         [&] {
                           engine.check_integrity();
                           CHECK_EQ(stats_of(engine), before);
                         },
                         [&] { before = stats_of(engine); });
    engine.check_integrity();
  }
  CHECK(engine.stats().at("run").index_failures > 0);  // of the namespace's index
}

TEST_CASE("Opening a session without memory changes nothing") {
  Engine engine;
  const std::vector<ResponseView> views = {{{}, kPrompt, {}, 1, 7}};
  engine.ingest("run", kPrompt, views);
  for (Token i = 0; i < 3; ++i) {
    const std::vector<Token> prompt = {1, 2, i}, generated(100, i);
    const auto before = stats_of(engine);
    fail_each_allocation([&] { engine.open(i == 0 ? "new" : "run", i == 1 ? kPrompt : prompt, "", generated, 7); },
                         [&] {
                           engine.check_integrity();
                           CHECK_EQ(stats_of(engine), before);
                         },
                         [] {});
  }
}

// Three letters, one per step: a session that loses its place in the history makes other drafts.
TEST_CASE("A session keeps its place in the history when memory runs out") {
  Random random(4);
  Engine engine;
  const std::vector<Token> response = random.text(300, 3);
  const std::vector<ResponseView> views = {{{}, response, {}, 1}};
  engine.ingest("run", kPrompt, views);
  const std::vector<SessionId> ids = {engine.open("run", kPrompt).id};
  const std::vector<std::int64_t> offsets = {0, 1};
  for (std::size_t i = 0; i < 250; ++i) {
    const Tokens came = Tokens(response).subspan(i, 1);
    const std::vector<std::int64_t> positions = {static_cast<std::int64_t>(i)};
    StepResult result;
    bool drafted = false;
    fail_each_allocation(
        [&] {
          engine.step({ids, came, offsets, positions, 16, 0.0f}, result);
          drafted = true;
        },
        [] {}, [] {});
    CHECK(drafted);
    if (i >= kMaxOrder) CHECK(std::ranges::equal(result.tokens, Tokens(response).subspan(i + 1, 16)));
  }
}

TEST_CASE("A step or close without memory can be sent again") {
  Random random(3);
  Engine engine;
  const std::vector<Token> response = random.text(500, 20);
  const std::vector<ResponseView> views = {{{}, response, {}, 1}};
  engine.ingest("run", kPrompt, views);
  for (int round = 0; round < 5; ++round) {
    const std::vector<SessionId> ids = {engine.open("run", kPrompt).id, engine.open("run", kPrompt, "", {}, 7).id};
    const std::vector<Token> tokens = random.text(200, 20);
    const std::vector<std::int64_t> offsets = {0, 100, 200}, positions = {0, 0};
    // A step that ran out of memory may have appended to some sessions; positions make sending it again safe.
    StepResult result;
    fail_each_allocation([&] { engine.step({ids, tokens, offsets, positions, 16, 0.0f}, result); },
                         [&] {
                           engine.check_integrity();
                           std::uint64_t appended = 0;
                           for (std::int64_t length : engine.lengths(ids)) {
                             CHECK((length == 0 || length == 100));
                             appended += static_cast<std::uint64_t>(length);
                           }
                           CHECK_EQ(engine.stats().at("run").generated_tokens, 200u * round + appended);
                           for (std::size_t b = 0; b < 2; ++b) {
                             const auto held = engine.generated(ids[b]);
                             CHECK_EQ(static_cast<std::int64_t>(held.size()),
                                      engine.lengths(std::span(ids).subspan(b, 1))[0]);
                           }
                         },
                         [] {});
    for (std::size_t b = 0; b < 2; ++b) {
      CHECK(std::ranges::equal(engine.generated(ids[b]), Tokens(tokens).subspan(100 * b, 100)));
      bool closed = false;  // it can do without memory for the twin
      fail_each_allocation(
          [&] {
            if (!closed) engine.close(ids[b]);
          },
          [&] {
            engine.check_integrity();
            CHECK_EQ(engine.lengths(std::span(ids).subspan(b, 1))[0], 100);
          },
          [&] { closed = true; });
    }
    engine.wait_until_built();
    CHECK_EQ(engine.history("run", kPrompt).size(), static_cast<std::size_t>(1 + 2 * (round + 1)));
  }
}

// A lookup that ran out of memory is repeated when the step is sent again.
TEST_CASE("A step that is sent again after a failure drafts the same") {
  Random random(7);
  const std::vector<Token> said = random.text(300, 20), came(said.begin(), said.begin() + 50);
  const auto run = [&](bool failing) {
    Engine engine({.namespace_tokens = 0});
    const std::vector<SessionId> ids = {engine.open("run", kPrompt).id};
    const std::vector<ResponseView> views = {{{}, said, {}, 1}};
    engine.ingest("run", kPrompt, views);
    const std::vector<std::int64_t> offsets = {0, 50}, positions = {0};
    StepResult result;
    const auto step = [&] { engine.step({ids, came, offsets, positions, 16, 0.0f}, result); };
    if (failing) {
      fail_each_allocation(step, [] {}, [] {});
    } else {
      step();
    }
    return result.tokens;
  };
  const std::vector<Token> expected = run(false);
  CHECK(!expected.empty());
  CHECK_EQ(run(true), expected);
}

// The texts are long enough that the housekeeper has to unlink them.
TEST_CASE("Closing a long session without memory changes nothing") {
  Random random(5);
  for (const bool commit : {false, true}) {
    Engine engine;
    std::vector<SessionId> ids;
    std::vector<std::vector<Token>> texts(4);
    StepResult result;
    for (auto& text : texts) {
      ids.push_back(engine.open("run", kPrompt).id);
      text = random.text(5000, 400);
      const std::vector<std::int64_t> offsets = {0, 5000};
      engine.step({std::span(ids).last(1), text, offsets, {}, 16, 0.0f}, result);
    }
    for (std::size_t b = 0; b < ids.size(); ++b) {
      bool closed = false;  // it can do without memory for sweeping
      fail_each_allocation(
          [&] {
            if (!closed) engine.close(ids[b], commit);
          },
          [&] {
            engine.check_integrity();
            CHECK_EQ(engine.generated(ids[b]), texts[b]);
          },
          [&] { closed = true; });
      engine.wait_until_built();
      engine.check_integrity();
    }
    CHECK_EQ(engine.history("run", kPrompt).size(), commit ? 4u : 0u);
  }
}

TEST_CASE("Dropping a namespace without memory keeps the engine intact") {
  Random random(6);
  Engine engine;
  const SessionId stays = engine.open("run", kPrompt).id;
  const std::vector<Token> text = random.text(9000, 400);
  const std::vector<std::int64_t> offsets = {0, 9000};
  for (int round = 0; round < 3; ++round) {
    const std::vector<SessionId> ids = {engine.open("run", kPrompt).id};
    StepResult result;
    engine.step({ids, text, offsets, {}, 16, 0.0f}, result);
    engine.close(ids[0]);
    const std::vector<ResponseView> views = {{{}, text, {}, 1}};
    engine.ingest("run", std::vector<Token>{7}, views);
    fail_each_allocation([&] { engine.drop_namespace("run"); }, [&] { engine.check_integrity(); }, [] {});
    engine.drop_namespace("run");
    engine.check_integrity();
    CHECK_EQ(engine.stats().at("run").history_responses, 0u);
    CHECK_EQ(engine.lengths(std::span(&stays, 1))[0], 0);
  }
}

// The segments here are small: large ones do not come from operator new, which does the counting.
TEST_CASE("The engine claims the memory that it holds, and leaks none") {
  const std::size_t before = allocations::held();
  {
    Random random(4);
    Engine engine({.namespace_tokens = 1 << 13});
    for (Token p = 0; p < 20; ++p) {
      const std::vector<Token> prompt = random.text(300, 500);
      std::vector<std::vector<Token>> texts(8);
      std::vector<ResponseView> views;
      for (auto& text : texts) {
        text = random.text(300, 500);
        views.push_back({{}, text, {}, 1, static_cast<std::int64_t>(views.size())});
      }
      engine.ingest("run", prompt, views);
      std::vector<SessionId> ids;
      for (int i = 0; i < 4; ++i) ids.push_back(engine.open("run", prompt, "", {}, i).id);
      std::vector<Token> tokens = random.text(4000, 500);
      const std::vector<std::int64_t> offsets = {0, 1000, 2000, 3000, 4000};
      StepResult result;
      engine.step({ids, tokens, offsets, {}, 16, 0.01f}, result);
    }
    const auto real = static_cast<double>(allocations::held() - before);
    const auto claimed = static_cast<double>(engine.memory_bytes());
    CAPTURE(real);
    CAPTURE(claimed);
    CHECK(claimed > 0.9 * real);
    CHECK(claimed < 1.3 * real);
  }
  CHECK_EQ(allocations::held(), before);
}
