#include "evidence.h"

#include <map>
#include <numeric>

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
    Evidence::Voices voices;
  };

  void add(Token token, const Evidence::Voices& voices) {
    if (token != kNothing && std::ranges::find(named, token) == named.end()) {
      if (named.size() < kNamed) {
        named.push_back(token);
      } else {
        token = kNothing;
      }
    }
    heard.push_back({token, voices});
  }

  Tally tally(Token token) const {
    Tally out = Tally::of(token);
    for (const auto& [said, v] : heard) {
      if (said != token) continue;
      out.votes[v.source] += v.votes;
      out.aligned += v.aligned;
      out.count += v.count;
      out.level = std::max(out.level, kLevelOf[v.shared]);
      if (v.shared > out.shared) out.shared = v.shared, out.source = v.source;  // the first of the best
    }
    for (const auto& [said, v] : heard) {
      if (said == token && kLevelOf[v.shared] == out.level) out.at_level += v.at_level;
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
    CHECK_EQ(tally.level, expected.level);
    CHECK_EQ(tally.at_level, expected.at_level);
    CHECK_EQ(tally.shared, expected.shared);
    CHECK_EQ(tally.source, expected.source);
  });
  std::vector<Token> expected = model.named;
  expected.push_back(kNothing);
  CHECK_EQ(tokens, expected);
  for (int source = 0; source < kSourceCount; ++source) {
    std::uint8_t level = 0;
    for (const auto& [token, v] : model.heard) {
      if (v.source == source) level = std::max(level, kLevelOf[v.shared]);
    }
    CHECK_EQ(evidence.matched(static_cast<Source>(source)), level);
  }
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
      const auto shared = static_cast<std::uint8_t>(random.between(1, kMaxOrder));
      const auto count = static_cast<std::uint8_t>(random.between(1, 4));
      Evidence::Voices voices{Evidence::kNoToken,
                              static_cast<Source>(random.below(kSourceCount)),
                              shared,
                              count,
                              static_cast<std::uint8_t>(random.between(1, count)),
                              static_cast<float>(random.below(1000)) / 8,
                              static_cast<float>(random.below(100)) / 4};
      if (token != kNothing) voices.name = evidence.name(token);
      evidence.add(voices);
      model.add(token, voices);
      if (random.one_in(20)) check_same(evidence, model, kShares[random.below(4)]);  // an election can be repeated
    }
    check_same(evidence, model, kShares[random.below(4)]);
  }
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
  evidence.add({Evidence::kNoToken, kHistory, 32, 8, 8, 100, 0});
  CHECK(elected(evidence, 0.0f).empty());
  CHECK(!evidence.unanimous());
  CHECK_EQ(evidence[Evidence::kNoToken].count, 8);
}

TEST(more_tokens_than_can_be_named) {
  Evidence evidence;
  for (Token token = 0; token < 40; ++token) {
    const float votes = token < static_cast<Token>(kNamed) ? 1 : 32;
    evidence.add({evidence.name(token), kOwn, 1, 1, 1, votes, 0});
    CHECK_EQ(evidence.name(token), std::min<std::size_t>(token, kNamed));
  }
  CHECK_EQ(elected(evidence, 0.0f), (std::vector<Token>{0, 1, 2, 3}));  // ties: the one named first
  CHECK_EQ(evidence[Evidence::kNoToken].count, 40 - kNamed);
}

int main() { return check::main(); }
