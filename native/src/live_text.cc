#include "live_text.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <new>

namespace histospec {
namespace {

constexpr LiveText::TextId kNoText = PairTable::kNoText;
// Dead places are walked over until so many tokens are dead; then they are swept out.
constexpr std::size_t kDeadTokens = 4096;
// How many places holds() looks at.
constexpr int kHeldPlaces = 64;

// How many tokens two texts that end there have in common at their ends, at least 2 and at most `most`.
int common_end(const Token* a, const Token* b, int most) {
  int length = 2;
  for (; length + 2 <= most; length += 2) {  // two at a time
    std::uint64_t x, y;
    std::memcpy(&x, a - length - 2, sizeof(x));
    std::memcpy(&y, b - length - 2, sizeof(y));
    if (x != y) return length + ((x ^ y) >> 32 == 0);
  }
  return length < most && a[-1 - length] == b[-1 - length] ? length + 1 : length;
}

}  // namespace

LiveText::TextId LiveText::allocate(State state) {
  TextId id;
  if (free_.empty()) {
    id = static_cast<TextId>(texts_.size());
    texts_.emplace_back();
    free_.reserve(texts_.capacity());  // so that forgetting a text never allocates
  } else {
    id = free_.back();
    free_.pop_back();
  }
  texts_[id].state = state;
  return id;
}

LiveText::TextId LiveText::add(State state, Tokens tokens, std::uint32_t first) {
  const TextId id = allocate(state);
  try {
    texts_[id].tokens.assign(tokens.begin(), tokens.end());
    index(id, first);
  } catch (...) {
    text_bytes_ -= texts_[id].counted;
    texts_[id] = Text();
    free_.push_back(id);
    throw;
  }
  return id;
}

LiveText::TextId LiveText::open(Tokens prompt) {
  TextId shared = kNoText;
  for (TextId id = 0; id < texts_.size() && shared == kNoText; ++id) {
    const Text& text = texts_[id];
    if (text.state == State::kPrompt && std::ranges::equal(text.tokens, prompt)) shared = id;
  }
  if (shared == kNoText) shared = add(State::kPrompt, prompt, 0);
  // The head is in the prompt's own text already. Places of this text are what ends after the head, and the end of the
  // head itself: what will stand there is the first generated token.
  const Tokens head = tail(prompt);
  const auto size = static_cast<std::uint32_t>(head.size());
  TextId id;
  try {
    id = add(State::kRunning, head, std::max(size, 1u) - 1);
  } catch (...) {
    if (texts_[shared].users == 0) release(shared);
    throw;
  }
  texts_[id].prompt = shared;
  texts_[id].head = size;
  ++texts_[shared].users;
  ++running_;
  return id;
}

void LiveText::append(TextId id, Tokens tokens) {
  Text& text = texts_[id];
  assert(text.state == State::kRunning);
  const auto first = static_cast<std::uint32_t>(text.tokens.size());
  text.tokens.insert(text.tokens.end(), tokens.begin(), tokens.end());
  index(id, first);
}

// Makes the tokens from `first` on searchable; where memory runs out, takes them away again.
void LiveText::index(TextId id, std::uint32_t first) {
  Text& text = texts_[id];
  try {
    newest_.reserve(text.tokens.size() - first);
    text.previous.resize(text.tokens.size());
  } catch (...) {
    text.tokens.resize(first);
    throw;
  }
  for (std::uint32_t i = std::max(first, 1u); i < text.tokens.size(); ++i) {
    Place& newest = newest_(text.tokens[i - 1], text.tokens[i]);
    text.previous[i] = newest;
    newest = {id, i + 1};
  }
  text.indexed += text.tokens.size() - first;
  indexed_tokens_ += text.tokens.size() - first;
  text_bytes_ -= text.counted;
  text.counted = text.tokens.capacity() * sizeof(Token) + text.previous.capacity() * sizeof(Place);
  text_bytes_ += text.counted;
}

void LiveText::finish(TextId id, std::int64_t epoch) {
  Text& text = texts_[id];
  assert(text.state == State::kRunning);
  text.state = State::kFinished;
  text.epoch = epoch;
  text.age = ++finishes_;
  --running_;
  ++finished_responses_;
  finished_tokens_ += text.tokens.size() - text.head;
}

void LiveText::drop(TextId id) {
  assert(texts_[id].state == State::kRunning);
  --running_;
  release(id);
  if (dead_tokens_ > std::max(kDeadTokens, indexed_tokens_ / 2)) sweep();
}

void LiveText::release(TextId id) {
  Text& text = texts_[id];
  const TextId prompt = text.prompt;
  const bool session = text.state != State::kPrompt;
  dead_tokens_ += text.indexed;
  // The tokens stay until the index is swept: places of other texts link through this one.
  text.state = State::kFree;
  text.head = static_cast<std::uint32_t>(text.tokens.size());
  if (session && --texts_[prompt].users == 0) release(prompt);
}

// Takes dead places out of their chains. What is left stays in its order. Without memory for it, the dead wait for the
// next time.
void LiveText::sweep() try {
  newest_.keep([this](Place& newest) {
    Place* link = &newest;
    while (link->text != kNoText) {
      Text& text = texts_[link->text];
      Place& before = text.previous[link->end - 1];
      if (text.state == State::kFree) {
        *link = before;
      } else {
        link = &before;
      }
    }
  });
  indexed_tokens_ -= dead_tokens_;
  dead_tokens_ = 0;
  free_.clear();
  for (TextId id = 0; id < texts_.size(); ++id) {
    Text& text = texts_[id];
    if (text.state != State::kFree) continue;
    text_bytes_ -= text.counted;
    text = Text();
    free_.push_back(id);
  }
} catch (const std::bad_alloc&) {
}

Tokens LiveText::generated(TextId id) const {
  const Text& text = texts_[id];
  return Tokens(text.tokens).subspan(text.head);
}

int LiveText::find(TextId own, Tokens context, std::span<Match> matches) const {
  if (context.size() < 2) return 0;
  const int limit = static_cast<int>(std::min<std::size_t>(matches.size(), kCandidates));
  const int longest = static_cast<int>(std::min<std::size_t>(context.size(), kMaxOrder));
  int found = 0;
  int walked = 0;
  for (Place place = newest_.find(context[context.size() - 2], context.back());
       place.text != kNoText && found < limit && walked < 2 * kCandidates; ++walked) {
    const Text& text = texts_[place.text];
    const std::uint32_t end = place.end;
    const bool relevant = place.text == own || text.state == State::kRunning || text.state == State::kFinished ||
                          (text.state == State::kPrompt && place.text == texts_[own].prompt);
    if (relevant && end < text.tokens.size()) {
      const int most = std::min(longest, static_cast<int>(end));
      const int length = common_end(text.tokens.data() + end, context.data() + context.size(), most);
      matches[found++] = {text.tokens[end], length, place.text == own || text.state == State::kPrompt};
    }
    place = text.previous[end - 1];
  }
  return found;
}

bool LiveText::holds(Tokens context) const {
  if (context.size() < 2) return false;
  int left = kHeldPlaces;
  for (Place place = newest_.find(context[context.size() - 2], context.back()); place.text != kNoText && left-- > 0;
       place = texts_[place.text].previous[place.end - 1]) {
    const Text& text = texts_[place.text];
    const bool whole = text.state == State::kRunning || text.state == State::kFinished;
    if (whole && place.end >= context.size() &&
        std::equal(context.begin(), context.end(), text.tokens.begin() + place.end - context.size())) {
      return true;
    }
  }
  return false;
}

std::vector<LiveText::TextId> LiveText::finished_texts() const {
  std::vector<TextId> ids;
  for (TextId id = 0; id < texts_.size(); ++id) {
    if (texts_[id].state == State::kFinished) ids.push_back(id);
  }
  std::ranges::sort(ids, {}, [this](TextId id) { return std::pair(texts_[id].epoch, texts_[id].age); });
  return ids;
}

std::vector<ResponseView> LiveText::finished() const {
  std::vector<ResponseView> views;
  for (TextId id : finished_texts()) {
    const Text& text = texts_[id];
    const Tokens all(text.tokens);
    views.push_back({all.first(text.head), all.subspan(text.head), {}, text.epoch});
  }
  return views;
}

void LiveText::dissolve(std::span<const TextId> ids) {
  for (TextId id : ids) {
    assert(texts_[id].state == State::kFinished);
    --finished_responses_;
    finished_tokens_ -= texts_[id].tokens.size() - texts_[id].head;
    release(id);
  }
  if (dead_tokens_ > std::max(kDeadTokens, indexed_tokens_ / 2)) sweep();
}

std::size_t LiveText::bytes() const {
  return sizeof(*this) + newest_.bytes() + free_.capacity() * sizeof(TextId) + texts_.capacity() * sizeof(Text) +
         text_bytes_;
}

}  // namespace histospec
