// Makes examples for the training of the estimator and of its foresight: replays recorded responses and writes, for
// each candidate, its inputs and whether it was the next token. scripts/train-estimator and scripts/train-foresight run
// it.
//
// It reads commands from stdin, as int32 numbers in the machine's byte order:
//
//     0                                                a new namespace; forgets everything
//     1 problem prompt n (epoch text) * n              n finished responses of one visit join the history
//     2 problem prompt n tag text * n                  replays n responses side by side, and writes examples
//     3 problem prompt n tag text * n seed * n         the same with coupled sampling: examples of the foresight
//
//     seed      = its upper and its lower 31 bits
//     prompt    = length token*
//     text      = turns (generated length token*) * turns
//     generated = 0 | 1
//
// Replayed responses do not join the history. The estimator learns from those with seeds only, because a foresight sees
// the estimates of an estimator that learns. Responses that are replayed side by side advance in steps, as the engine's
// sessions do if a draft costs nothing: up to kMaxStep tokens, as long as the candidate with the most votes is right.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "draft/drafter.h"
#include "index/namespace_index.h"

using namespace histospec;

namespace {

constexpr int kHistoryEpochs = 8;
constexpr std::size_t kNamespaceTokens = std::size_t{1} << 20;
constexpr std::size_t kMaxStep = 16;

// One candidate, or one contender of a foresight.
struct Example {
  std::array<std::uint8_t, Estimator::kContexts> rows;
  std::uint8_t right;
  std::uint16_t tag;
  std::array<float, Estimator::kInputs> x;
};
static_assert(sizeof(Example) == Estimator::kContexts + 3 + 4 * Estimator::kInputs);
static_assert(Foresight::kInputs == Estimator::kInputs);

[[noreturn]] void fail(const char* why) {
  std::fprintf(stderr, "estimator_examples: %s\n", why);
  std::exit(1);
}

void write(const Example& example) {
  if (std::fwrite(&example, sizeof(example), 1, stdout) != 1) fail("cannot write");
}

// Returns false at the end of the input.
bool read(std::int32_t& word) { return std::fread(&word, sizeof(word), 1, stdin) == 1; }

std::int32_t word() {
  std::int32_t w;
  if (!read(w) || w < 0) fail("the input is cut, or holds a negative number");
  return w;
}

void read_tokens(std::vector<Token>& tokens) {
  const auto count = static_cast<std::size_t>(word());
  const std::size_t before = tokens.size();
  tokens.resize(before + count);
  if (std::fread(tokens.data() + before, sizeof(Token), count, stdin) != count) fail("the input is cut");
}

Response read_text() {
  Response text;
  for (std::int32_t turns = word(); turns > 0; --turns) {
    const std::int32_t generated = word();
    read_tokens(text.tokens);
    text.generated.resize(text.tokens.size(), static_cast<std::uint8_t>(generated != 0));
  }
  return text;
}

// Replays one response as a running session.
class Writer {
 public:
  Writer(const Response& text, Tokens prompt, LiveText& live, const std::shared_ptr<const Segments>& history,
         const std::shared_ptr<const Segments>& namespace_segments)
      : text_(text),
        live_(live),
        id_(live.open(prompt)),
        sources_{*history, *namespace_segments, LiveSource(live, id_)} {
    for (Token token : tail(prompt)) context_.tail.push(token);
    for (Token token : prompt) noise_.push(token);
    context_.history_source.reset(*history, context_.tail.tokens());
    context_.namespace_source.reset(*namespace_segments, context_.tail.tokens());
    append_environment();
  }

  bool done() const { return at_ == text_.tokens.size(); }

  // Writes examples for the tokens of the next step. With a seed, the estimator learns from them.
  void explain(std::uint16_t tag, std::optional<std::int64_t> seed, Estimator& estimator) {
    context_.history_source.catch_up(sources_.history, context_.tail.tokens());
    DraftContext ahead = context_;
    if (seed) ahead.noise.start(*seed, noise_);
    next_ = at_;
    bool foreseen = true;
    while (foreseen && next_ < text_.tokens.size() && text_.generated[next_] && next_ - at_ < kMaxStep) {
      const Token came = text_.tokens[next_++];
      foreseen = seed ? explain(ahead, came, tag, estimator) : explain(ahead, came, tag);
      push(ahead, came);
      ahead.run = foreseen ? ahead.run + 1 : 0;
    }
    context_.run = ahead.run;
  }

  // Appends these tokens to the live text, where the other writers find them.
  void append() {
    append_until(next_);
    append_environment();
  }

 private:
  bool explain(DraftContext& context, Token came, std::uint16_t tag) const {
    const Evidence evidence = gather(context, sources_);
    Estimator::Features features;
    Estimator::describe(evidence, -1, context.run, features);
    for (int c = 0; c < features.size; ++c) {
      const bool right = evidence[evidence.candidates()[c]].token == came;
      write({features.rows, right, tag, features.x[c]});
    }
    return features.size > 0 && evidence[evidence.candidates()[0]].token == came;
  }

  bool explain(DraftContext& context, Token came, std::uint16_t tag, Estimator& estimator) const {
    const Evidence evidence = gather(context, sources_);
    if (evidence.candidates().empty()) return false;
    Prediction prediction;
    predict(evidence, context, sources_, estimator, true, prediction);
    if (prediction.foreseen) {
      const Foresight::Contenders& contenders = prediction.contenders;
      for (std::size_t i = 0; i < contenders.size; ++i) {
        const bool right = prediction.tokens[contenders.candidates[i]] == came;
        write({prediction.features.rows, right, tag, contenders.inputs[i]});
      }
    }
    learn(estimator, prediction, came);
    return prediction.token() == came;
  }

  static void push(DraftContext& context, Token token) {
    context.push(token, {});
    context.history_source.advance(1);
    context.namespace_source.advance(1);
  }

  void append_until(std::size_t end) {
    live_.append(id_, Tokens(text_.tokens).subspan(at_, end - at_));
    for (; at_ < end; ++at_) {
      push(context_, text_.tokens[at_]);
      noise_.push(text_.tokens[at_]);
    }
  }

  void append_environment() {
    std::size_t end = at_;
    while (end < text_.tokens.size() && !text_.generated[end]) ++end;
    if (end == at_) return;
    append_until(end);
    context_.run = 0;
  }

  const Response& text_;
  LiveText& live_;
  LiveText::TextId id_;
  DraftSources sources_;  // alive while all responses of one visit are replayed
  DraftContext context_;
  NoiseCounter noise_;
  std::size_t at_ = 0;    // tokens appended so far
  std::size_t next_ = 0;  // tokens appended after this step
};

class Namespace {
 public:
  void ingest() {
    auto& history = history_of(word());
    std::vector<Token> prompt;
    read_tokens(prompt);
    std::vector<Response> responses;
    for (std::int32_t n = word(); n > 0; --n) {
      const std::int32_t epoch = word();
      responses.push_back(read_text());
      responses.back().head = prompt;
      responses.back().epoch = epoch;
    }
    std::vector<ResponseView> views;
    for (const Response& response : responses) views.push_back(response.view());
    if (views.empty()) fail("nothing to ingest");
    LeftOut evicted;
    history = with_responses(*history, views, {kHistoryEpochs}, evicted);
    index_.add(views.front());
    if (!index_.ready()) return;
    const NamespaceIndex::Batch batch = index_.take();
    index_.publish(batch, index_.merge(batch));
  }

  void explain(bool seeded) {
    const auto& history = history_of(word());
    std::vector<Token> prompt;
    read_tokens(prompt);
    const std::int32_t count = word();
    const auto tag = static_cast<std::uint16_t>(word());
    std::vector<Response> texts;
    for (std::int32_t n = count; n > 0; --n) texts.push_back(read_text());
    std::vector<std::optional<std::int64_t>> seeds(texts.size());
    for (auto& seed : seeds) {
      if (!seeded) break;
      seed = static_cast<std::int64_t>(word()) << 31;
      *seed |= word();
    }
    LiveText live;
    std::deque<Writer> writers;
    for (const Response& text : texts) writers.emplace_back(text, prompt, live, history, index_.segments());
    // First all writers explain, from the same live text; then all append.
    while (!std::ranges::all_of(writers, &Writer::done)) {
      for (std::size_t i = 0; i < writers.size(); ++i) writers[i].explain(tag, seeds[i], estimator_);
      for (Writer& writer : writers) writer.append();
    }
  }

 private:
  std::shared_ptr<const Segments>& history_of(std::int32_t problem) {
    auto& history = histories_[problem];
    if (!history) history = std::make_shared<const Segments>();
    return history;
  }

  std::map<std::int32_t, std::shared_ptr<const Segments>> histories_;
  NamespaceIndex index_{kNamespaceTokens};
  Estimator estimator_;
};

}  // namespace

int main() {
  auto namespace_ = std::make_unique<Namespace>();
  for (std::int32_t command; read(command);) {
    switch (command) {
      case 0:
        namespace_ = std::make_unique<Namespace>();
        break;
      case 1:
        namespace_->ingest();
        break;
      case 2:
        namespace_->explain(false);
        break;
      case 3:
        namespace_->explain(true);
        break;
      default:
        fail("the input has an unknown command; must be 0, 1, 2 or 3");
    }
  }
  if (std::fflush(stdout) != 0) fail("cannot write");
}
