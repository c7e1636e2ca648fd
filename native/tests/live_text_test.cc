#include "live/live_text.h"

#include <map>
#include <optional>
#include <tuple>

#include "allocations.h"
#include "random_text.h"
#include "reference_model.h"
#include "test.h"

using namespace histospec;
using testing::Random;
using TextId = LiveText::TextId;

namespace {

// The same live text as plain lists.
class Model {
 public:
  struct Text {
    std::vector<Token> prompt, generated;
    std::int64_t epoch = 0;
    std::size_t age = 0;  // the step in which it finished
    enum { kRunning, kFinished, kGone } state = kRunning;
  };

  // A pair of neighbouring tokens, in the order in which they became searchable.
  struct Place {
    TextId text;      // for a prompt: any text that shares it
    bool prompt;      // in the prompt, else in prompt + generated
    std::size_t end;  // one past the pair
  };

  void open(TextId id, const std::vector<Token>& prompt) {
    const bool known = std::ranges::any_of(
        texts, [&](const auto& t) { return t.second.state != Text::kGone && t.second.prompt == prompt; });
    texts[id] = {prompt, {}, 0, 0, Text::kRunning};
    if (!known) {
      for (std::size_t end = 2; end <= prompt.size(); ++end) place(id, true, end);
    }
    // What stands behind the prompt will be this text's.
    if (prompt.size() >= 2) place(id, false, prompt.size());
  }

  void append(TextId id, Tokens tokens) {
    Text& text = texts.at(id);
    for (Token token : tokens) {
      text.generated.push_back(token);
      const std::size_t end = text.prompt.size() + text.generated.size();
      if (end >= 2) place(id, false, end);
    }
  }

  void remove(TextId id) {
    Text& gone = texts.at(id);
    gone.state = Text::kGone;
    for (auto place = places.begin(); place != places.end();) {
      if (place->text != id) {
        ++place;
        continue;
      }
      // A prompt lives as long as one text shares it.
      if (place->prompt) {
        const auto heir = std::ranges::find_if(
            texts, [&](const auto& t) { return t.second.state != Text::kGone && t.second.prompt == gone.prompt; });
        if (heir != texts.end()) {
          place->text = heir->first;
          ++place;
          continue;
        }
      }
      place = places.erase(place);
    }
  }

  // All live places that continue the context and are of interest to `own`, newest first.
  std::vector<LiveText::Occurrence> find(TextId own, Tokens context) const {
    std::vector<LiveText::Occurrence> out;
    if (context.size() < 2) return out;
    for (auto place = places.rbegin(); place != places.rend(); ++place) {
      const Text& text = texts.at(place->text);
      if (place->prompt && text.prompt != texts.at(own).prompt) continue;
      std::vector<Token> all = text.prompt;
      if (!place->prompt) all.insert(all.end(), text.generated.begin(), text.generated.end());
      if (place->end >= all.size()) continue;
      // Other texts keep no more of a prompt than its end.
      const std::size_t kept = place->prompt || text.prompt.size() <= kMaxOrder ? 0 : text.prompt.size() - kMaxOrder;
      int length = 0;
      while (length < kMaxOrder && static_cast<std::size_t>(length) < std::min(place->end - kept, context.size()) &&
             all[place->end - 1 - length] == context[context.size() - 1 - length]) {
        ++length;
      }
      if (length >= 2) out.push_back({all[place->end], length, place->prompt || place->text == own});
    }
    return out;
  }

  // How many places of the context's last pair there were ever, dead or alive.
  std::size_t ever(Tokens context) const {
    const auto found = places_of_.find({context[context.size() - 2], context.back()});
    return found == places_of_.end() ? 0 : found->second;
  }

  std::map<TextId, Text> texts;
  std::vector<Place> places;

 private:
  void place(TextId id, bool prompt, std::size_t end) {
    places.push_back({id, prompt, end});
    const Text& text = texts.at(id);
    const auto at = [&](std::size_t i) {
      return i < text.prompt.size() ? text.prompt[i] : text.generated[i - text.prompt.size()];
    };
    ++places_of_[{at(end - 2), at(end - 1)}];
  }

  std::map<std::pair<Token, Token>, std::size_t> places_of_;
};

void check_find(const LiveText& live, const Model& model, TextId own, Tokens context) {
  std::array<LiveText::Occurrence, LiveText::kCandidates> found;
  const auto n = static_cast<std::size_t>(live.find(own, context, found));
  const auto expected = model.find(own, context);
  CHECK(n <= expected.size());
  for (std::size_t i = 0; i < n; ++i) {
    CHECK_EQ(found[i].next, expected[i].next);
    CHECK_EQ(found[i].match_length, expected[i].match_length);
    CHECK_EQ(found[i].own, expected[i].own);
  }
  // Fewer only where the walk met too many places of no use: dead, of another prompt, or at the end of their text.
  if (n < std::min<std::size_t>(expected.size(), LiveText::kCandidates)) {
    CHECK(model.ever(context) > 2 * LiveText::kCandidates);
  }
}

void check_all(const LiveText& live, const Model& model) {
  std::size_t running = 0, finished_tokens = 0;
  std::vector<std::tuple<std::int64_t, std::size_t, TextId>> finished;
  for (const auto& [id, text] : model.texts) {
    if (text.state == Model::Text::kGone) continue;
    CHECK(std::ranges::equal(live.generated(id), text.generated));
    if (text.state == Model::Text::kRunning) {
      ++running;
    } else {
      finished.emplace_back(text.epoch, text.age, id);
      finished_tokens += text.generated.size();
    }
  }
  CHECK_EQ(live.running(), running);
  CHECK_EQ(live.finished_responses(), finished.size());
  CHECK_EQ(live.finished_tokens(), finished_tokens);
  std::ranges::sort(finished);
  const auto views = live.finished();
  const auto ids = live.finished_texts();
  CHECK_EQ(views.size(), finished.size());
  for (std::size_t i = 0; i < views.size(); ++i) {
    CHECK_EQ(ids[i], std::get<2>(finished[i]));
    CHECK_EQ(views[i].epoch, std::get<0>(finished[i]));
    const Model::Text& text = model.texts.at(ids[i]);
    CHECK(std::ranges::equal(views[i].tokens, text.generated));
    const Tokens head = Tokens(text.prompt).last(std::min<std::size_t>(text.prompt.size(), kMaxOrder));
    CHECK(std::ranges::equal(views[i].head, head));
    CHECK(views[i].generated.empty());
  }
}

std::vector<TextId> with_state(const Model& model, int state) {
  std::vector<TextId> ids;
  for (const auto& [id, text] : model.texts) {
    if (text.state == state) ids.push_back(id);
  }
  return ids;
}

// `piece`: how many tokens an append brings at most. Large ones make the index be swept.
void play(std::uint64_t seed, std::size_t steps, std::size_t piece) {
  CAPTURE(seed);
  Random random(seed);
  LiveText live;
  Model model;
  const std::size_t alphabet = random.between(1, 8);
  std::vector<std::vector<Token>> prompts;
  for (std::size_t i = random.between(1, 3); i > 0; --i)
    prompts.push_back(random.text(random.between(1, 40), alphabet));
  for (std::size_t step = 0; step < steps; ++step) {
    const auto running = with_state(model, Model::Text::kRunning);
    const auto finished = with_state(model, Model::Text::kFinished);
    const std::size_t what = random.below(13);
    if (what <= 1 || running.empty()) {
      const auto& prompt = prompts[random.below(prompts.size())];
      model.open(live.open(prompt), prompt);
    } else if (what <= 6) {
      const TextId id = running[random.below(running.size())];
      const std::vector<Token> tokens = random.text(random.below(piece + 1), alphabet);
      live.append(id, tokens);
      model.append(id, tokens);
    } else if (what == 7) {
      const TextId id = running[random.below(running.size())];
      live.drop(id);
      model.remove(id);
    } else if (what == 8) {
      const TextId id = running[random.below(running.size())];
      model.texts.at(id).state = Model::Text::kFinished;
      model.texts.at(id).age = step;
      model.texts.at(id).epoch = static_cast<std::int64_t>(random.below(3));
      live.finish(id, model.texts.at(id).epoch);
    } else if (what == 9 && !finished.empty()) {
      std::vector<TextId> some;
      for (TextId id : finished) {
        if (random.one_in(2)) some.push_back(id);
      }
      live.dissolve(some);
      for (TextId id : some) model.remove(id);
    } else if (what == 10) {
      live.tidy(random.below(2 * piece));  // what is forgotten is not found, whether it is unlinked yet or not
    } else {
      const TextId id = running[random.below(running.size())];
      const Model::Text& text = model.texts.at(id);
      std::vector<Token> context = text.prompt;
      context.insert(context.end(), text.generated.begin(), text.generated.end());
      if (random.one_in(3)) context.push_back(static_cast<Token>(random.below(alphabet)));
      const std::size_t keep = random.below(20);
      if (context.size() > keep) context.erase(context.begin(), context.end() - static_cast<std::ptrdiff_t>(keep));
      check_find(live, model, id, context);
    }
    if (step % 8 == 0) check_all(live, model);
  }
  check_all(live, model);
}

}  // namespace

TEST_CASE("Small groups agree with a model of plain lists") {
  for (std::uint64_t seed = 0; seed < 120; ++seed) play(seed, 100, 6);
}

TEST_CASE("Long texts that are dropped leave the others searchable") {
  for (std::uint64_t seed = 0; seed < 4; ++seed) play(seed, 100, 800);
}

TEST_CASE("The first token of a sibling is found") {
  LiveText live;
  const std::vector<Token> prompt = {5, 6, 7};
  const TextId a = live.open(prompt), b = live.open(prompt);
  live.append(a, std::vector<Token>{42});
  std::array<LiveText::Occurrence, LiveText::kCandidates> found;
  CHECK_EQ(live.find(b, prompt, found), 1);
  CHECK_EQ(found[0].next, 42);
  CHECK_EQ(found[0].match_length, 3);
  CHECK(!found[0].own);
}

TEST_CASE("The text of another prompt is not found") {
  LiveText live;
  const std::vector<Token> mine = {1, 2, 3, 4}, other = {1, 2, 9, 9};
  const TextId a = live.open(mine);
  live.open(other);
  std::array<LiveText::Occurrence, LiveText::kCandidates> found;
  CHECK_EQ(live.find(a, std::vector<Token>{1, 2}, found), 1);
  CHECK_EQ(found[0].next, 3);
  CHECK(found[0].own);
}

TEST_CASE("A lookup returns no more than it was asked for") {
  LiveText live;
  const TextId a = live.open(std::vector<Token>(100, 1));
  std::array<LiveText::Occurrence, 100> found;
  const std::vector<Token> context = {1, 1, 1};
  CHECK_EQ(live.find(a, context, found), LiveText::kCandidates);
  CHECK_EQ(live.find(a, context, std::span(found).first(3)), 3);
  CHECK_EQ(live.find(a, context, std::span(found).first(0)), 0);
  CHECK_EQ(live.find(a, std::vector<Token>{1}, found), 0);
  CHECK_EQ(live.find(a, {}, found), 0);
}

TEST_CASE("A long prompt becomes searchable in slices") {
  Random random(3);
  LiveText live;
  const std::vector<Token> prompt = random.text(3 * LiveText::kSlice, 1 << 20);
  const TextId text = live.open(prompt);
  live.append(text, std::vector<Token>{1, 2, 3});  // meanwhile
  int slices = 1;
  while (live.index_some(text)) ++slices;
  CHECK_EQ(slices, 2);
  std::array<LiveText::Occurrence, LiveText::kCandidates> found;
  for (std::size_t at = 40; at < prompt.size(); at += 997) {
    CHECK(live.find(text, Tokens(prompt).first(at), found) > 0);
    CHECK_EQ(found[0].next, prompt[at]);
    CHECK_EQ(found[0].match_length, kMaxOrder);
  }
  // A session that goes half-way takes the prompt with it.
  const std::vector<Token> other = random.text(2 * LiveText::kSlice, 1 << 20);
  const TextId gone = live.open(other);
  live.drop(gone);
  while (live.tidy(1000)) {
  }
  for (std::size_t at = 40; at < other.size(); at += 997) {
    const int n = live.find(text, Tokens(other).first(at), found);
    for (int i = 0; i < n; ++i) CHECK(found[i].match_length < kMaxOrder);
  }
  CHECK(live.find(text, Tokens(prompt).first(100), found) > 0);
  CHECK_EQ(found[0].next, prompt[100]);
}

TEST_CASE("A dropped text returns its memory") {
  Random random(4);
  LiveText live;
  const TextId stays = live.open(std::vector<Token>{1, 2, 3});
  std::size_t after_first = 0;
  for (int round = 0; round < 50; ++round) {
    const TextId text = live.open(std::vector<Token>{1, 2, 3});
    live.append(text, random.text(20000, 1000));
    live.drop(text);
    while (live.tidy()) {
    }
    if (round == 0) after_first = live.bytes();
  }
  CHECK(live.bytes() < 2 * after_first);
  live.append(stays, std::vector<Token>{4, 5});
  std::array<LiveText::Occurrence, LiveText::kCandidates> found;
  CHECK_EQ(live.find(stays, std::vector<Token>{3, 4}, found), 1);
}

TEST_CASE("Responses leave in the order in which they finished") {
  LiveText live;
  const std::vector<Token> prompt = {1, 2}, words = {3, 4, 5, 6};
  std::vector<TextId> texts;
  for (int i = 0; i < 4; ++i) {
    texts.push_back(live.open(prompt));
    live.append(texts.back(), words);
    live.finish(texts.back(), -i);
  }
  CHECK_EQ(live.finished_texts(1), (std::vector<TextId>{texts[0]}));
  CHECK_EQ(live.finished_texts(11), (std::vector<TextId>{texts[1], texts[0]}));
  live.dissolve(live.finished_texts(8));
  CHECK_EQ(live.finished_texts(), (std::vector<TextId>{texts[3], texts[2]}));
  CHECK_EQ(live.finished_tokens(), 8u);
}

// Live text counts its bytes by itself; operator new counts the true ones.
TEST_CASE("bytes() is what live text allocated") {
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    const std::size_t before = allocations::held();
    std::optional<LiveText> live(std::in_place);
    std::vector<TextId> texts;
    const auto compare = [&] {
      const auto real = static_cast<double>(allocations::held() - before);
      const auto claimed = static_cast<double>(live->bytes());
      // The vector of ids here, and half a KiB of slack, are not the live text's.
      CHECK(claimed >= real * 0.85 - 512);
      CHECK(claimed <= real * 1.25 + 512);
    };
    texts.reserve(64);
    for (int i = 0; i < 40; ++i) texts.push_back(live->open(random.text(200, 1000)));
    for (int i = 0; i < 40; ++i) live->append(texts[i], random.text(random.below(3000), 1 << 20));
    compare();
    for (int i = 0; i < 20; ++i) live->drop(texts[i]);
    compare();
    while (live->tidy()) {
    }
    CHECK(live->take_freed() != nullptr);
    compare();
    for (int i = 20; i < 40; ++i) live->finish(texts[i], 1);
    live->dissolve(live->finished_texts());
    compare();
  }
}
