#include "draft/evidence.h"

#include <algorithm>

#include "check.h"
#include "random_text.h"

using namespace histospec;
using testing::Random;

namespace {

constexpr std::size_t kNamed = Evidence::kNoToken;  // tokens that can be told apart
constexpr Token kNothing = -1;                      // a response ended, the text was not generated, a token too many

// The same as plain lists. Votes are integers over powers of two, so that sums are exact.
class Model {
 public:
  struct Said {
    Token token;
    Witness witness;
    float vote;
    float aligned;
  };

  void hear(Said said) {
    if (said.token != kNothing && std::ranges::find(named, said.token) == named.end()) {
      if (named.size() < kNamed) {
        named.push_back(said.token);
      } else {
        said.token = kNothing;
      }
    }
    heard.push_back(said);
  }

  Tally tally(Token token) const {
    Tally out{.token = token};
    for (const Said& said : heard) {
      if (said.token != token) continue;
      out.votes[said.witness.source()] += said.vote;
      out.aligned += said.aligned;
      ++out.count;
      if (said.witness.shared() > out.best.shared()) out.best = said.witness;  // the first of the best
    }
    for (const Said& said : heard) {
      out.at_level += said.token == token && kLevelOf[said.witness.shared()] == out.level();
    }
    return out;
  }

  std::vector<Token> elected(float share) const {
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
  std::vector<Said> heard;
};

std::vector<Token> elected(Evidence& evidence, float share) {
  evidence.elect(share);
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
    CHECK_EQ(tally.best.shared(), expected.best.shared());
    CHECK_EQ(tally.best.source(), expected.best.source());
    CHECK_EQ(tally.best.where(), expected.best.where());
  });
  std::vector<Token> expected = model.named;
  expected.push_back(kNothing);
  CHECK_EQ(tokens, expected);
  CHECK_EQ(elected(evidence, share), model.elected(share));
}

}  // namespace

TEST(against_plain_lists) {
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    check::subject = "seed " + std::to_string(seed);
    Random random(seed);
    Evidence evidence;
    Model model;
    const std::size_t alphabet = random.between(1, 40);
    constexpr float kShares[] = {0.0f, 0.125f, 0.5f, 1.0f};
    for (std::size_t n = random.below(60); n > 0; --n) {
      const Token token = random.one_in(8) ? kNothing : static_cast<Token>(random.below(alphabet) * 1000);
      const Witness witness(static_cast<std::uint8_t>(random.between(1, kMaxOrder)),
                            static_cast<Source>(random.below(kSourceCount)),
                            static_cast<std::uint16_t>(random.below(UINT16_MAX + 1)));
      const float vote = static_cast<float>(random.below(1000)) / 8,
                  aligned = static_cast<float>(random.below(100)) / 4;
      evidence.hear(token == kNothing ? Evidence::kNoToken : evidence.name(token), witness, vote, aligned);
      model.hear({token, witness, vote, aligned});
      if (random.one_in(20)) check_same(evidence, model, kShares[random.below(4)]);  // an election can be repeated
    }
    check_same(evidence, model, kShares[random.below(4)]);
  }
}

TEST(what_a_source_knows_is_what_its_best_witness_shares) {
  Evidence evidence;
  for (std::uint8_t shared : {3, 9, 5}) evidence.match(kOwn, shared);
  CHECK_EQ(evidence.matched(kOwn), kLevelOf[9]);
  CHECK_EQ(evidence.matched(kHistory), 0);
}

TEST(levels_ascend_to_the_largest_order) {
  CHECK_EQ(kLevelOf[0], 0);
  for (int shared = 1; shared <= kMaxOrder; ++shared) {
    CHECK(kLevelOf[shared] >= kLevelOf[shared - 1]);
    CHECK(kLevelOf[shared] < kLevels);
  }
  CHECK_EQ(kLevelOf[kMaxOrder], kLevels - 1);
}

TEST(who_shares_more_says_more_and_who_is_nearer) {
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

TEST(nobody_says_anything) {
  Evidence evidence;
  CHECK(elected(evidence, 0.1f).empty());
  CHECK(!evidence.unanimous());
  for (int i = 0; i < 8; ++i) evidence.hear(Evidence::kNoToken, Witness(32, kHistory), 100);
  CHECK(elected(evidence, 0.0f).empty());
  CHECK(!evidence.unanimous());
  CHECK_EQ(evidence[Evidence::kNoToken].count, 8);
}

TEST(more_tokens_than_can_be_named) {
  Evidence evidence;
  for (Token token = 0; token < 40; ++token) {
    const float votes = token < static_cast<Token>(kNamed) ? 1 : 32;
    evidence.hear(evidence.name(token), Witness(1, kOwn), votes);
    CHECK_EQ(evidence.name(token), std::min<std::size_t>(token, kNamed));
  }
  CHECK_EQ(elected(evidence, 0.0f), (std::vector<Token>{0, 1, 2, 3}));  // ties: the one named first
  CHECK_EQ(evidence[Evidence::kNoToken].count, 40 - kNamed);
}

int main() { return check::main(); }
