#include "sources.h"

#include <set>

#include "check.h"
#include "random_text.h"
#include "reference_model.h"

using namespace histospec;
using testing::occurrences;
using testing::Random;

namespace {

constexpr int kAlignedOrder = 3;
constexpr std::int64_t kAlignedWindow = 12;
constexpr std::size_t kAlignedRows = 16;  // beyond, a sample

struct Corpus {
  std::vector<std::vector<Response>> texts;  // one entry a segment
  std::shared_ptr<const Segments> segments;
};

Corpus random_corpus(Random& random) {
  Corpus corpus;
  Segments segments;
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

Candidates candidates_of(std::initializer_list<Token> tokens) {
  Candidates candidates;
  for (Token token : tokens) candidates.vote(token, 1);
  candidates.elect();
  return candidates;
}

// A sample of what is there: all of it where that is little, never more, and no order without rows.
void check_counts(const Counts& counts, const Counts& all, std::size_t segments) {
  std::uint32_t longer = 0;
  for (int a = kOrderCount; a-- > 0;) {
    CHECK(counts.total[a] <= all.total[a]);
    CHECK(counts.total[a] >= std::min(all.total[a], HistorySource::kNearRows));
    CHECK(counts.total[a] >= longer);
    CHECK(counts.total[a] <= longer + segments * 2 * HistorySource::kNearRows);
    if (all.total[0] <= HistorySource::kNearRows) CHECK_EQ(counts.total[a], all.total[a]);
    std::uint32_t named = 0, all_named = 0;
    for (int c = 0; c < kMaxCandidates; ++c) {
      CHECK(counts.of[a][c] <= all.of[a][c]);
      named += counts.of[a][c];
      all_named += all.of[a][c];
    }
    CHECK(named <= counts.total[a]);
    CHECK(counts.total[a] - named <= all.total[a] - all_named);  // the others
    longer = counts.total[a];
  }
}

void check_evidence(const Corpus& corpus, const HistorySource& source, Tokens context, std::int64_t offset) {
  Evidence evidence;
  evidence.candidates = candidates_of({0, 1, 3, 77});
  source.count(evidence.candidates, evidence.counts[kHistory]);
  source.count_aligned(offset, evidence);

  Counts expected;
  std::uint32_t aligned_total = 0;
  std::array<std::uint32_t, kMaxCandidates> aligned{};
  int depth = 0;
  bool sampled = false;
  for (const auto& responses : corpus.texts) {
    std::size_t rows = 0;
    for (const auto& place : occurrences(responses, context)) {
      depth = std::max(depth, place.length);
      for (int a = 0; a < kOrderCount && kOrders[a] <= place.length; ++a) {
        ++expected.total[a];
        for (int c = 0; c < kMaxCandidates; ++c) expected.of[a][c] += place.next == evidence.candidates[c];
      }
      if (place.length < kAlignedOrder) continue;
      ++rows;
      if (place.next == testing::kNothing || std::abs(place.offset - offset) > kAlignedWindow) continue;
      ++aligned_total;
      for (int c = 0; c < kMaxCandidates; ++c) aligned[c] += place.next == evidence.candidates[c];
    }
    sampled = sampled || rows > kAlignedRows;
  }
  CHECK_EQ(source.depth(), depth);
  check_counts(evidence.counts[kHistory], expected, corpus.texts.size());
  if (!sampled) {
    CHECK_EQ(evidence.aligned_total, aligned_total);
    CHECK_EQ(evidence.aligned, aligned);
  } else {
    CHECK(evidence.aligned_total <= aligned_total);
  }
}

void check_proposals(const Corpus& corpus, const HistorySource& source, Tokens context) {
  Candidates candidates;
  source.propose(candidates);
  candidates.elect();
  std::set<Token> possible;
  std::size_t places = 0;
  for (const auto& responses : corpus.texts) {
    for (const auto& place : occurrences(responses, context)) {
      ++places;
      if (place.next != testing::kNothing) possible.insert(place.next);
    }
  }
  for (int c = 0; c < candidates.size(); ++c) CHECK(possible.contains(candidates[c]));
  // Where all places are looked at, nothing is overlooked.
  if (places <= 3) {
    CHECK_EQ(static_cast<std::size_t>(candidates.size()), std::min<std::size_t>(possible.size(), kMaxCandidates));
  }
}

}  // namespace

TEST(history_counts_what_is_there) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    check::subject = "seed " + std::to_string(seed);
    Random random(seed);
    Corpus corpus = random_corpus(random);
    HistorySource source;
    source.reset(corpus.segments, {});
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
      source.follow(corpus.segments, context);
      source.catch_up(context);
      check_evidence(corpus, source, context, static_cast<std::int64_t>(random.below(60)));
      check_proposals(corpus, source, context);
    }
  }
}

TEST(live_evidence_is_what_was_found) {
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    check::subject = "seed " + std::to_string(seed);
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
      std::array<LiveText::Match, LiveText::kCandidates> matches;
      const int found = live.find(own, context, matches);
      LiveSource source(live, own);
      source.find(context);
      Evidence evidence;
      evidence.candidates = candidates_of({0, 1, 2});
      source.count(evidence);
      std::array<Counts, kSourceCount> expected{};
      std::set<Token> possible;
      for (int m = 0; m < found; ++m) {
        possible.insert(matches[m].next);
        Counts& counts = expected[matches[m].own ? kOwn : kSiblings];
        for (int a = 0; a < kOrderCount && kOrders[a] <= matches[m].length; ++a) {
          ++counts.total[a];
          for (int c = 0; c < 3; ++c) counts.of[a][c] += matches[m].next == evidence.candidates[c];
        }
      }
      for (int s = 0; s < kSourceCount; ++s) {
        CHECK_EQ(evidence.counts[s].total, expected[s].total);
        for (int a = 0; a < kOrderCount; ++a) CHECK_EQ(evidence.counts[s].of[a], expected[s].of[a]);
      }
      Candidates candidates;
      source.propose(candidates);
      candidates.elect();
      CHECK_EQ(static_cast<std::size_t>(candidates.size()), std::min<std::size_t>(possible.size(), kMaxCandidates));
      for (int c = 0; c < candidates.size(); ++c) CHECK(possible.contains(candidates[c]));
    }
  }
}

TEST(the_tail_of_a_context) {
  ContextTail tail;
  std::vector<Token> all;
  for (Token token = 0; token < 500; ++token) {
    CHECK(std::ranges::equal(tail.tokens(), Tokens(all).last(std::min<std::size_t>(all.size(), kMaxOrder))));
    tail.push(token);
    all.push_back(token);
  }
}

TEST(candidates_are_elected_by_votes) {
  Candidates candidates;
  for (Token token = 0; token < 30; ++token) candidates.vote(token % 10, static_cast<float>(token % 7));
  candidates.elect();
  std::array<float, 10> votes{};
  for (Token token = 0; token < 30; ++token) votes[token % 10] += static_cast<float>(token % 7);
  CHECK_EQ(candidates.size(), kMaxCandidates);
  for (int c = 0; c < kMaxCandidates; ++c) {
    const auto better = std::ranges::count_if(votes, [&](float v) { return v > votes[candidates[c]]; });
    CHECK(better <= c);
  }
}

int main() { return check::main(); }
