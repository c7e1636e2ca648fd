#include "draft/evidence.h"

#include <algorithm>

#include "random_text.h"
#include "test.h"

using namespace histospec;
using testing::Random;

namespace {

constexpr std::size_t kNamed = Evidence::kNoToken;  // tokens that can be told apart
constexpr Token kNothing = -1;                      // a response ended, the text was not generated, a token too many

// The same as plain lists. Votes are integers over powers of two, so that sums are exact.
class Model {
 public:
  struct Added {
    Token token;
    Match match;
    float vote;
    float aligned;
  };

  void add_match(Added entry) {
    if (entry.token != kNothing && std::ranges::find(named, entry.token) == named.end()) {
      if (named.size() < kNamed) {
        named.push_back(entry.token);
      } else {
        entry.token = kNothing;
      }
    }
    added.push_back(entry);
  }

  Tally tally(Token token) const {
    Tally out{.token = token};
    for (const Added& entry : added) {
      if (entry.token != token) continue;
      out.votes[entry.match.source()] += entry.vote;
      out.aligned += entry.aligned;
      ++out.count;
      if (entry.match.length() > out.best.length()) out.best = entry.match;  // the first of the best
    }
    for (const Added& entry : added) {
      out.at_level += entry.token == token && kLevelOf[entry.match.length()] == out.level();
    }
    return out;
  }

  std::vector<Token> picked(float share) const {
    std::vector<std::pair<float, Token>> votes;
    for (Token token : named) votes.emplace_back(tally(token).all(), token);
    std::ranges::stable_sort(votes, [](const auto& a, const auto& b) { return a.first > b.first; });
    std::vector<Token> out;
    for (const auto& [vote, token] : votes) {
      if (out.size() < kMaxCandidates && vote >= share * votes[0].first) out.push_back(token);
    }
    return out;
  }

  std::vector<Token> named;
  std::vector<Added> added;
};

std::vector<Token> picked(Evidence& evidence, float share) {
  evidence.pick_candidates(share);
  std::vector<Token> out;
  for (Evidence::Name name : evidence.candidates()) out.push_back(evidence[name].token);
  return out;
}

void check_same(Evidence& evidence, const Model& model, float share) {
  CHECK_EQ(evidence.unanimous(), model.named.size() == 1);
  std::vector<Token> tokens;
  evidence.each([&](const Tally& tally) {
    tokens.push_back(tally.token);
    const Tally expected = model.tally(tally.token);
    CHECK_EQ(tally.votes, expected.votes);
    CHECK_EQ(tally.aligned, expected.aligned);
    CHECK_EQ(tally.count, expected.count);
    CHECK_EQ(tally.at_level, expected.at_level);
    CHECK_EQ(tally.best.length(), expected.best.length());
    CHECK_EQ(tally.best.source(), expected.best.source());
    CHECK_EQ(tally.best.epoch_id(), expected.best.epoch_id());
  });
  std::vector<Token> expected = model.named;
  expected.push_back(kNothing);
  CHECK_EQ(tokens, expected);
  CHECK_EQ(picked(evidence, share), model.picked(share));
}

}  // namespace

TEST_CASE("Evidence agrees with a model of plain lists") {
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    Evidence evidence;
    Model model;
    const std::size_t alphabet = random.between(1, 40);
    constexpr float kShares[] = {0.0f, 0.125f, 0.5f, 1.0f};
    for (std::size_t n = random.below(60); n > 0; --n) {
      const Token token = random.one_in(8) ? kNothing : static_cast<Token>(random.below(alphabet) * 1000);
      const Match match(static_cast<std::uint8_t>(random.between(1, kMaxOrder)),
                        static_cast<Source>(random.below(kSourceCount)),
                        static_cast<std::uint16_t>(random.below(UINT16_MAX + 1)));
      const float vote = static_cast<float>(random.below(1000)) / 8,
                  aligned = static_cast<float>(random.below(100)) / 4;
      evidence.add_match(token == kNothing ? Evidence::kNoToken : evidence.name(token), match, vote, aligned);
      model.add_match({token, match, vote, aligned});
      if (random.one_in(20)) check_same(evidence, model, kShares[random.below(4)]);  // candidates can be picked again
    }
    check_same(evidence, model, kShares[random.below(4)]);
  }
}

TEST_CASE("The level of a source is that of its longest match") {
  Evidence evidence;
  for (std::uint8_t length : {3, 9, 5}) evidence.note_match_length(kOwn, length);
  CHECK_EQ(evidence.longest_level(kOwn), kLevelOf[9]);
  CHECK_EQ(evidence.longest_level(kHistory), 0);
}

TEST_CASE("Levels ascend up to the longest match length") {
  CHECK_EQ(kLevelOf[0], 0);
  for (int length = 1; length <= kMaxOrder; ++length) {
    CHECK(kLevelOf[length] >= kLevelOf[length - 1]);
    CHECK(kLevelOf[length] < kLevels);
  }
  CHECK_EQ(kLevelOf[kMaxOrder], kLevels - 1);
}

TEST_CASE("Longer and nearer matches have larger votes") {
  for (int nearness = 0; nearness < 15; ++nearness) {
    CHECK(Evidence::vote(5, nearness) > Evidence::vote(5, nearness + 1));
    CHECK(Evidence::vote(6, nearness) > Evidence::vote(5, nearness));
  }
  CHECK_EQ(Evidence::alignment(0), 1.0f);
  for (std::int64_t distance = 0; distance < 100; ++distance) {
    CHECK(Evidence::alignment(distance) > Evidence::alignment(distance + 1));
    CHECK_EQ(Evidence::alignment(distance), Evidence::alignment(-distance));
  }
}

TEST_CASE("Without a token there are no candidates") {
  Evidence evidence;
  CHECK(picked(evidence, 0.1f).empty());
  CHECK(!evidence.unanimous());
  for (int i = 0; i < 8; ++i) evidence.add_match(Evidence::kNoToken, Match(32, kHistory), 100);
  CHECK(picked(evidence, 0.0f).empty());
  CHECK(!evidence.unanimous());
  CHECK_EQ(evidence[Evidence::kNoToken].count, 8);
}

TEST_CASE("Tokens beyond the number of names count as no token") {
  Evidence evidence;
  for (Token token = 0; token < 40; ++token) {
    const float votes = token < static_cast<Token>(kNamed) ? 1 : 32;
    evidence.add_match(evidence.name(token), Match(1, kOwn), votes);
    CHECK_EQ(evidence.name(token), std::min<std::size_t>(token, kNamed));
  }
  CHECK_EQ(picked(evidence, 0.0f), (std::vector<Token>{0, 1, 2, 3}));  // ties: the one named first
  CHECK_EQ(evidence[Evidence::kNoToken].count, 40 - kNamed);
}
