#include "draft/sources.h"

#include <map>

#include "random_text.h"
#include "reference_model.h"
#include "test.h"

using namespace histospec;
using testing::occurrences;
using testing::Random;

namespace {

struct Corpus {
  std::vector<std::vector<Response>> texts;  // one entry a segment
  std::shared_ptr<const Segments> segments;
};

Corpus random_corpus(Random& random) {
  Corpus corpus;
  Segments::List segments;
  const std::size_t alphabet = random.between(1, 6);
  for (std::size_t s = random.below(4); s > 0; --s) {
    std::vector<Response> responses(random.between(1, 4));
    std::vector<ResponseView> views;
    for (Response& r : responses) {
      r.head = random.text(random.below(20), alphabet);
      r.tokens = random.text(random.below(100), alphabet);
      for (std::size_t i = 0; random.one_in(4) && i < r.tokens.size(); ++i) {
        r.generated.resize(r.tokens.size(), 1);
        r.generated[i] = static_cast<std::uint8_t>(random.below(2));
      }
      views.push_back(r.view());
    }
    segments.push_back(Segment::build(views));
    corpus.texts.push_back(responses);
  }
  corpus.segments = std::make_shared<const Segments>(segments);
  return corpus;
}

// The number of matches of each token; kNothing has those of no token, and of tokens without a name.
std::map<Token, std::size_t> counts(const Evidence& evidence) {
  std::map<Token, std::size_t> out;
  evidence.each([&](const Tally& tally) {
    if (tally.count > 0) out[tally.token] += static_cast<std::size_t>(tally.count);
  });
  return out;
}

// Every match is in the texts. Of those left out, each segment has enough nearer ones.
void check_history(const Corpus& corpus, const SegmentSource& source, Tokens context, std::int64_t offset) {
  int depth = 0;
  std::size_t matches_alone = 0;
  for (std::size_t s = 0; s < corpus.texts.size(); ++s) {
    const auto segment = std::make_shared<const Segments>(Segments::List{corpus.segments->list()[s]});
    SegmentSource alone;
    alone.reset(*segment, context);
    Evidence evidence;
    alone.collect_matches(*segment, kHistory, offset, evidence);
    std::map<Token, std::size_t> there;
    std::size_t all = 0, matches = 0;
    int longest = 0;
    for (const auto& place : occurrences(corpus.texts[s], context)) {
      ++there[place.next];
      ++all;
      longest = std::max(longest, place.length);
    }
    // There are fewer letters than names, so every token has a name.
    for (const auto& [token, count] : counts(evidence)) {
      CHECK(count <= there[token]);
      matches += count;
    }
    const auto most = static_cast<std::size_t>(Segment::most_near({0, static_cast<std::uint8_t>(longest), 0}));
    CHECK(matches >= std::min(all, most));
    CHECK(matches <= 2 * most);
    if (all <= most) CHECK_EQ(counts(evidence), there);
    CHECK_EQ(evidence.longest_level(kHistory), kLevelOf[longest]);
    int match_length = 0;
    evidence.each([&](const Tally& tally) {
      match_length = std::max<int>(match_length, tally.best.length());
      CHECK(tally.at_level <= tally.count);
      CHECK(tally.all() <= static_cast<float>(kMaxOrder) * tally.count);
      CHECK_EQ(tally.all() > 0, tally.count > 0);
      CHECK(tally.aligned >= 0);
      CHECK(tally.aligned <= tally.all() * 1.0001f);
    });
    CHECK_EQ(match_length, longest);
    depth = std::max(depth, longest);
    matches_alone += matches;
  }
  CHECK_EQ(source.depth(), depth);
  // All segments together give the same matches, under the source that was asked for.
  Evidence together;
  source.collect_matches(*corpus.segments, kNamespace, offset, together);
  std::size_t matches = 0;
  for (const auto& [token, count] : counts(together)) matches += count;
  CHECK_EQ(matches, matches_alone);
  CHECK_EQ(together.longest_level(kNamespace), kLevelOf[depth]);
  CHECK_EQ(together.longest_level(kHistory), 0);
  together.each([&](const Tally& tally) { CHECK_EQ(tally.aligned, 0.0f); });
}

}  // namespace

TEST_CASE("A source collects the matches that its segments hold") {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    Corpus corpus = random_corpus(random);
    SegmentSource source;
    source.reset(*corpus.segments, {});
    std::vector<Token> context;
    for (int i = 0; i < 12; ++i) {
      // A few tokens that did follow somewhere, or noise; sometimes behind other segments than before.
      if (random.one_in(6)) corpus = random_corpus(random);
      std::vector<Token> came;
      for (std::size_t n = random.below(random.one_in(5) ? 40 : 6); n > 0; --n) {
        std::vector<Token> all = context;
        all.insert(all.end(), came.begin(), came.end());
        Token next = static_cast<Token>(random.below(5));
        if (!corpus.texts.empty() && !random.one_in(10)) {
          const auto places = occurrences(corpus.texts[random.below(corpus.texts.size())], all);
          for (std::size_t k = 0; k < places.size(); ++k) {
            if (places[k].next != testing::kNothing && random.one_in(k + 1)) next = places[k].next;
          }
        }
        came.push_back(next);
      }
      context.insert(context.end(), came.begin(), came.end());
      source.advance(came.size());
      source.follow(*corpus.segments, context);
      source.catch_up(*corpus.segments, context);
      check_history(corpus, source, context, static_cast<std::int64_t>(random.below(60)));
    }
  }
}

// So it may use less of the context, but never claims a longer match.
TEST_CASE("A source that is too far behind searches again from the last tokens") {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    const Corpus corpus = random_corpus(random);
    const std::size_t patience = random.between(1, 10);
    SegmentSource source(patience);
    source.reset(*corpus.segments, {});
    std::vector<Token> context;
    std::size_t seen = 0;  // of the context's end
    for (int i = 0; i < 30; ++i) {
      const std::vector<Token> came = random.text(random.below(2 * patience), 5);
      context.insert(context.end(), came.begin(), came.end());
      source.advance(came.size());
      seen = came.size() > patience ? patience : seen + came.size();
      const Tokens tail = Tokens(context).last(std::min<std::size_t>(context.size(), kMaxOrder));
      source.catch_up(*corpus.segments, tail);
      int depth = 0;
      for (const auto& responses : corpus.texts) {
        for (const auto& place : occurrences(responses, Tokens(context).last(std::min(context.size(), seen)))) {
          depth = std::max(depth, place.length);
        }
      }
      CHECK_EQ(source.depth(), depth);
    }
  }
}

TEST_CASE("A source that reads fewer rows reads the nearest") {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    const Corpus corpus = random_corpus(random);
    const int rows = static_cast<int>(random.between(1, Segment::kNear));
    SegmentSource all, few(kMaxOrder, rows);
    const std::vector<Token> context = random.text(random.below(8), 5);
    all.reset(*corpus.segments, context), few.reset(*corpus.segments, context);
    Evidence by_all, by_few;
    all.collect_matches(*corpus.segments, kNamespace, 0, by_all),
        few.collect_matches(*corpus.segments, kNamespace, 0, by_few);
    CHECK_EQ(by_few.longest_level(kNamespace), by_all.longest_level(kNamespace));
    const std::map<Token, std::size_t> expected = counts(by_all);
    std::size_t matches = 0;
    for (const auto& [token, count] : counts(by_few)) {
      CHECK(expected.contains(token));
      CHECK(count <= expected.at(token));
      matches += count;
    }
    CHECK(matches <= 2 * static_cast<std::size_t>(rows) * corpus.texts.size());
  }
}

TEST_CASE("Resuming from a trail gives the same matches as walking") {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    Corpus corpus = random_corpus(random);
    SegmentSource walks, resumes;
    walks.reset(*corpus.segments, {}), resumes.reset(*corpus.segments, {});
    std::vector<Token> context;
    for (int step = 0; step < 8; ++step) {
      const bool lazy = random.one_in(3);  // caught up at some positions only, as other problems are
      if (!lazy) resumes.catch_up(*corpus.segments, context);
      SegmentSource ahead = resumes;
      Trail trail;
      const std::vector<Token> drafted = random.text(random.below(10), 5);
      std::vector<Token> seen = context;
      for (std::size_t i = 0; i <= drafted.size(); ++i) {
        if (!lazy || random.one_in(3)) ahead.catch_up(*corpus.segments, tail(seen));
        ahead.mark(trail, i);
        if (i == drafted.size()) break;
        seen.push_back(drafted[i]);
        ahead.advance(1);
      }
      const std::size_t accepted = random.below(drafted.size() + 1);
      std::vector<Token> came(drafted.begin(), drafted.begin() + static_cast<std::ptrdiff_t>(accepted));
      resumes.advance(accepted, trail, accepted);
      if (random.one_in(5)) {  // nothing marked before is true of other segments
        corpus = random_corpus(random);
        walks.follow(*corpus.segments, context), resumes.follow(*corpus.segments, context);
        SegmentSource fresh = resumes;
        fresh.advance(0, trail, 0);
        CHECK_EQ(fresh.depth(), resumes.depth());
        resumes.advance(accepted);
      }
      if (random.one_in(2)) came.push_back(static_cast<Token>(random.below(5))), resumes.advance(1);
      context.insert(context.end(), came.begin(), came.end());
      walks.advance(came.size());
      walks.catch_up(*corpus.segments, tail(context)), resumes.catch_up(*corpus.segments, tail(context));
      Evidence one, other;
      walks.collect_matches(*corpus.segments, kHistory, 0, one);
      resumes.collect_matches(*corpus.segments, kHistory, 0, other);
      CHECK_EQ(counts(one), counts(other));
      CHECK_EQ(walks.depth(), resumes.depth());
    }
  }
}

TEST_CASE("A source does not read segments that are gone") {
  const std::vector<Token> old_text = {1, 2, 3}, new_text = {1, 2, 4}, context = {1, 2};
  const std::vector<ResponseView> old_views = {{{}, old_text, {}, 0}}, new_views = {{{}, new_text, {}, 0}};
  auto segments = std::make_shared<const Segments>(Segments::List{Segment::build(old_views)});
  SegmentSource source;
  source.reset(*segments, context);
  const auto next = [&] {
    Evidence evidence;
    source.collect_matches(*segments, kHistory, 0, evidence);
    evidence.pick_candidates(0);
    std::vector<Token> tokens;
    for (Evidence::Name name : evidence.candidates()) tokens.push_back(evidence[name].token);
    return tokens;
  };
  CHECK_EQ(next(), std::vector<Token>{3});
  segments = std::make_shared<const Segments>(Segments::List{Segment::build(new_views)});  // the old ones die here
  source.follow(*segments, context);
  CHECK_EQ(next(), std::vector<Token>{4});
  segments = std::make_shared<const Segments>();
  source.follow(*segments, context);
  CHECK_EQ(next(), std::vector<Token>());
  CHECK_EQ(source.depth(), 0);
}

TEST_CASE("The live source collects the occurrences in live text") {
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    LiveText live;
    const std::vector<Token> prompt = random.text(random.between(1, 30), 4);
    const LiveText::TextId own = live.open(prompt), sibling = live.open(prompt);
    std::vector<Token> context = prompt;
    for (int i = 0; i < 10; ++i) {
      const std::vector<Token> mine = random.text(random.below(5), 4);
      live.append(own, mine);
      live.append(sibling, random.text(random.below(5), 4));
      context.insert(context.end(), mine.begin(), mine.end());
      std::array<LiveText::Occurrence, LiveText::kCandidates> occurrences;
      const int found = live.find(own, context, occurrences);
      Evidence evidence;
      LiveSource(live, own).collect_matches(context, evidence);
      std::map<Token, std::size_t> expected;
      std::array<int, kSourceCount> longest{};
      for (int m = 0; m < found; ++m) {
        ++expected[occurrences[m].next];
        int& length = longest[occurrences[m].own ? kOwn : kSiblings];
        length = std::max(length, occurrences[m].match_length);
      }
      CHECK_EQ(counts(evidence), expected);
      for (Source s : {kHistory, kOwn, kSiblings, kNamespace})
        CHECK_EQ(evidence.longest_level(s), kLevelOf[longest[s]]);
      evidence.each([](const Tally& tally) {
        CHECK_EQ(tally.votes[kHistory] + tally.votes[kNamespace] + tally.aligned, 0.0f);
        CHECK_EQ(tally.all() > 0, tally.count > 0);
      });
    }
  }
}

TEST_CASE("The tail of a context is its last kMaxOrder tokens") {
  ContextTail tail;
  std::vector<Token> all;
  for (Token token = 0; token < 500; ++token) {
    CHECK(std::ranges::equal(tail.tokens(), Tokens(all).last(std::min<std::size_t>(all.size(), kMaxOrder))));
    tail.push(token);
    all.push_back(token);
  }
}
