#include "draft/drafter.h"

#include <numeric>
#include <set>

#include "random_text.h"
#include "test.h"

using namespace histospec;
using testing::Random;

namespace {

// A session in the middle of its text, with a history, siblings, other problems of its namespace, and perhaps a twin.
struct Scene {
  explicit Scene(std::uint64_t seed, bool has_twin = false) {
    Random random(seed);
    const std::size_t alphabet = random.between(2, 12);
    const std::vector<Token> prompt = random.text(random.between(1, 40), alphabet);
    for (auto* part : {&history, &namespace_history}) {
      Segments::List segments;
      for (std::size_t n = random.below(3); n > 0; --n) {
        const std::vector<Token> text = random.text(random.below(300), alphabet);
        const std::vector<ResponseView> views = {{prompt, text, {}, 0}};
        segments.push_back(Segment::build(views));
      }
      *part = std::make_shared<const Segments>(segments);
    }
    own = live.open(prompt);
    live.append(live.open(prompt), random.text(random.below(200), alphabet));
    const std::vector<Token> generated = random.text(random.below(100), alphabet);
    live.append(own, generated);
    for (Token token : prompt) context.tail.push(token);
    if (has_twin) {
      twin = generated;
      for (Token& token : twin) token = random.one_in(6) ? 500 : token;
      for (std::size_t n = random.below(30); n > 0; --n) twin.push_back(static_cast<Token>(random.below(alphabet)));
    }
    for (Token token : generated) context.push(token, twin);
    context.history_source.reset(*history, context.tail.tokens());
    context.namespace_source.reset(*namespace_history, context.tail.tokens());
    for (Token token = 0; token < static_cast<Token>(alphabet); ++token) tokens.insert(token);
  }

  DraftSources sources() const { return {*history, *namespace_history, LiveSource(live, own), twin}; }

  Draft draft(int max_tokens, float verify_cost) {
    DraftContext ahead = context;
    Draft out;
    histospec::draft(ahead, sources(), estimator, trust, {max_tokens, verify_cost}, out);
    CHECK_EQ(ahead.generated, context.generated + std::ssize(out.tokens));
    const Tokens tail = ahead.tail.tokens();
    const std::size_t seen = std::min(tail.size(), out.tokens.size());
    CHECK(std::ranges::equal(tail.last(seen), Tokens(out.tokens).last(seen)));
    return out;
  }

  // Drafts one token, and sees what comes, here and again.
  void learn(Tokens came) {
    DraftContext ahead = context;
    histospec::learn(estimator, draft(1, 0.0f), came.first(1), ahead);
  }

  std::shared_ptr<const Segments> history, namespace_history;
  LiveText live;
  LiveText::TextId own;
  std::vector<Token> twin;
  DraftContext context;
  Estimator estimator;
  TwinTrust trust;
  std::set<Token> tokens;
};

}  // namespace

TEST_CASE("A draft is the most probable candidate at each position") {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    CAPTURE(seed);
    Scene scene(seed);
    for (int max_tokens : {0, 1, 5, 40}) {
      const Draft draft = scene.draft(max_tokens, 0.0f);
      CHECK(draft.tokens.size() <= static_cast<std::size_t>(max_tokens));
      CHECK_EQ(draft.probabilities.size(), draft.tokens.size());
      CHECK_EQ(draft.origins.size(), draft.tokens.size());
      CHECK(draft.predictions.size() - draft.tokens.size() <= 1);
      for (std::size_t i = 0; i < draft.predictions.size(); ++i) {
        const Prediction& prediction = draft.predictions[i];
        CHECK(prediction.features.size >= 1);
        CHECK(prediction.features.size <= kMaxCandidates);
        std::set<Token> different;
        for (int c = 0; c < prediction.features.size; ++c) {
          CHECK(scene.tokens.contains(prediction.tokens[c]));
          CHECK(prediction.probabilities[c] > 0);
          CHECK(prediction.probabilities[c] < 1);
          CHECK(prediction.probabilities[c] <= prediction.probabilities[prediction.best]);
          different.insert(prediction.tokens[c]);
        }
        CHECK_EQ(different.size(), static_cast<std::size_t>(prediction.features.size));
        CHECK_EQ(prediction.position, i);
        if (i == draft.tokens.size()) continue;
        CHECK_EQ(draft.tokens[i], prediction.token());
        CHECK_EQ(draft.probabilities[i], prediction.probabilities[prediction.best]);
      }
    }
  }
}

TEST_CASE("A twin is followed again where its text continues the session") {
  std::vector<Token> twin(200);
  std::iota(twin.begin(), twin.end(), 1000);
  const auto after = [&](const std::vector<Token>& said) {
    DraftContext context;
    for (Token token : said) context.push(token, twin);
    return context;
  };
  const auto text = [&](std::size_t first, std::size_t last) { return std::vector(&twin[first], &twin[last]); };
  const auto joined = [](std::vector<Token> a, const std::vector<Token>& b, const std::vector<Token>& c) {
    a.insert(a.end(), b.begin(), b.end());
    a.insert(a.end(), c.begin(), c.end());
    return a;
  };
  const DraftContext faithful = after(text(0, 50));
  CHECK(*faithful.next_of(twin) == 1050);
  CHECK(faithful.agreement.faithful);
  CHECK(faithful.agreement.streak == 50);
  const DraftContext replaced = after(joined(text(0, 50), {1, 2, 3}, text(53, 60)));
  CHECK(*replaced.next_of(twin) == 1060);
  CHECK(!replaced.agreement.faithful);
  CHECK(!replaced.agreement.shifted);
  CHECK_EQ(replaced.agreement.streak, 7);
  const DraftContext inserted = after(joined(text(0, 50), {1, 2, 3}, text(50, 60)));
  CHECK(*inserted.next_of(twin) == 1060);
  CHECK(inserted.agreement.shifted);
  CHECK_EQ(inserted.agreement.streak, 10);
  const DraftContext left_out = after(joined(text(0, 50), {}, text(90, 100)));
  CHECK(*left_out.next_of(twin) == 1100);
  CHECK(left_out.agreement.shifted);
  const DraftContext returned = after(joined(joined(text(0, 50), {1, 2, 3}, text(50, 60)), {4}, text(64, 70)));
  CHECK(*returned.next_of(twin) == 1070);
  CHECK(!returned.agreement.shifted);
  const DraftContext too_far = after(joined(text(0, 50), {}, text(130, 140)));
  CHECK(*too_far.next_of(twin) == 1060);
  CHECK(too_far.agreement.streak == 0);
  const DraftContext too_short = after(joined(text(0, 50), {1}, text(50, 53)));
  CHECK(*too_short.next_of(twin) == 1054);
  CHECK(too_short.agreement.streak == 0);
  const DraftContext past_the_end = after(joined(text(0, 200), {1, 2}, {}));
  CHECK(past_the_end.next_of(twin) == nullptr);
}

TEST_CASE("A followed twin is drafted alone, or if it is more probable than the evidence") {
  std::size_t alone = 0, rather = 0, not_twins = 0;
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    CAPTURE(seed);
    Scene scene(seed, true);
    DraftContext ahead = scene.context;
    const Draft draft = scene.draft(40, 0.0f);
    auto prediction = draft.predictions.begin();
    for (std::size_t i = 0; i < draft.tokens.size(); ++i) {
      const bool estimated = prediction != draft.predictions.end() && prediction->position == i;
      const bool from_twin = draft.origins[i].source == kTwin;
      const float probability = draft.probabilities[i];
      CHECK((from_twin || estimated));
      if (from_twin) CHECK_EQ(draft.tokens[i], *ahead.next_of(scene.twin));
      ahead.push(draft.tokens[i], scene.twin);
      if (from_twin && estimated) CHECK(probability >= prediction->probabilities[prediction->best]);
      if (!from_twin) CHECK_EQ(draft.tokens[i], prediction->token());
      alone += !estimated;
      rather += from_twin && estimated;
      not_twins += !from_twin;
      prediction += estimated;
    }
    CHECK(draft.predictions.end() - prediction <= 1);
  }
  CHECK(alone > 1000);
  CHECK(rather > 10);
  CHECK(not_twins > 1000);
}

TEST_CASE("A higher cost or a lower limit shortens a draft, and changes nothing else") {
  std::size_t shorter = 0;
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    CAPTURE(seed);
    Scene scene(seed, seed % 2 == 0);
    const Draft longest = scene.draft(30, 0.0f);
    std::size_t last = longest.tokens.size();
    for (float cost : {0.0f, 0.001f, 0.02f, 0.1f, 0.3f, 1.0f}) {
      const Draft draft = scene.draft(30, cost);
      CHECK(draft.tokens.size() <= last);
      float survival = 1;
      for (float probability : draft.probabilities) CHECK((survival *= probability) >= cost);  // it pays for itself
      shorter += draft.tokens.size() < last;
      last = draft.tokens.size();
      CHECK(std::ranges::equal(draft.tokens, Tokens(longest.tokens).first(last)));
      CHECK(std::ranges::equal(draft.probabilities, std::span(longest.probabilities).first(last)));
      if (cost >= 1) CHECK_EQ(last, 0u);
    }
    const Draft limited = scene.draft(7, 0.0f);
    CHECK(std::ranges::equal(limited.tokens, Tokens(longest.tokens).first(limited.tokens.size())));
    CHECK_EQ(limited.tokens.size(), std::min<std::size_t>(longest.tokens.size(), 7));
  }
  CHECK(shorter > 100);
}

TEST_CASE("A draft that is used again is overwritten") {
  Scene scene(3);
  Draft draft = scene.draft(20, 0.0f);
  DraftContext ahead = scene.context;
  const Draft before = draft;
  histospec::draft(ahead, scene.sources(), scene.estimator, scene.trust, {20, 0.0f}, draft);
  CHECK_EQ(draft.tokens, before.tokens);
  CHECK_EQ(draft.predictions.size(), before.predictions.size());
  ahead = scene.context;
  histospec::draft(ahead, scene.sources(), scene.estimator, scene.trust, {0, 0.0f}, draft);
  CHECK(draft.tokens.empty());
  CHECK(draft.probabilities.empty());
  CHECK(draft.predictions.empty());
}

TEST_CASE("The accepted tokens are the common beginning of draft and response") {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    Scene scene(seed, random.one_in(2));
    const Draft draft = scene.draft(16, random.one_in(2) ? 0.0f : 0.05f);
    std::vector<Token> came = draft.tokens;
    if (!came.empty()) came.resize(random.below(came.size() + 1));
    const std::size_t kept = came.size();
    for (std::size_t n = random.below(4); n > 0; --n) came.push_back(static_cast<Token>(random.below(12)));
    if (!came.empty() && random.one_in(4)) came[random.below(came.size())] = 500;
    std::size_t common = 0;
    while (common < std::min(came.size(), draft.tokens.size()) && came[common] == draft.tokens[common]) ++common;
    CAPTURE(kept);
    CHECK_EQ(learn(scene.estimator, draft, came, scene.context), static_cast<int>(common));
    // A run is what was foreseen without a break: all of it, or nothing since the first that was not.
    CHECK((scene.context.run == 0 || scene.context.run == std::ssize(came)));
    // It learns where it estimated: at each position up to the first that was not foreseen.
    CHECK_EQ(scene.estimator.bytes() > 0, !draft.predictions.empty() && draft.predictions[0].position < came.size() &&
                                              draft.predictions[0].position <= common);
  }
}

TEST_CASE("Drafts that are accepted become more probable, and rejected ones stop") {
  std::size_t held = 0;
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    CAPTURE(seed);
    Scene scene(seed);
    const Draft first = scene.draft(8, 0.0f);
    if (first.tokens.empty()) continue;
    ++held;
    for (int i = 0; i < 3000; ++i) scene.learn(first.tokens);
    const Draft right = scene.draft(8, 0.0f);
    CHECK_EQ(right.tokens[0], first.tokens[0]);
    CHECK(right.probabilities[0] > first.probabilities[0]);
    const std::vector<Token> wrong = {500};
    for (int i = 0; i < 6000; ++i) scene.learn(wrong);
    CHECK(scene.draft(8, 0.1f).tokens.empty());
  }
  CHECK(held > 20);
}
