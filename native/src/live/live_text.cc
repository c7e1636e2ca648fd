#include "live/live_text.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <new>
#include <utility>

#include "hash/keyed.h"

namespace histospec {
namespace {

// How many links holds() visits.
constexpr int kHeldLinks = 64;
// Texts of this many bytes and more go to take_freed().
constexpr std::size_t kLargeText = 1 << 15;
// Bytes of a node of the map of prompts.
constexpr std::size_t kPromptNode = 40;

// The length of the common suffix of two texts that end at `a` and `b`. At least 2 (their last pairs are equal), at
// most `most`.
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
    going_.reserve(texts_.capacity());
  } else {
    id = free_.back();
    free_.pop_back();
  }
  texts_[id].state = state;
  return id;
}

// Adds a text whose links end at its tokens from `first` on.
LiveText::TextId LiveText::add(State state, Tokens tokens, std::uint32_t first, Buffers&& buffers) {
  const TextId id = allocate(state);
  Text& text = texts_[id];
  text.first = text.linked = std::max(first, 1u);
  try {
    if (buffers.tokens.empty()) {
      text.tokens.assign(tokens.begin(), tokens.end());
    } else {
      text.tokens = std::move(buffers.tokens);
      text.links = std::move(buffers.links);
    }
    make_room(id);
    link(id, kSlice);
  } catch (...) {
    free(id);
    throw;
  }
  return id;
}

LiveText::TextId LiveText::find_prompt(Tokens prompt, std::uint64_t hash) const {
  const auto [first, last] = prompts_.equal_range(hash);
  const auto same = [&](const auto& known) { return std::ranges::equal(texts_[known.second].tokens, prompt); };
  const auto found = std::find_if(first, last, same);
  return found == last ? kNoText : found->second;
}

LiveText::Buffers LiveText::buffers_for(Tokens prompt, std::uint64_t hash) {
  if (prompt.size() <= kSlice) return {{}, {}, hash};
  return {{prompt.begin(), prompt.end()}, std::vector<Link>(prompt.size()), hash};
}

LiveText::TextId LiveText::open(Tokens prompt, Buffers&& buffers) {
  const std::uint64_t hash = buffers.hash ? *buffers.hash : hash_key.of(prompt);
  TextId prompt_text = find_prompt(prompt, hash);
  if (prompt_text == kNoText) {
    const auto entry = prompts_.emplace(hash, kNoText);
    try {
      prompt_text = entry->second = add(State::kPrompt, prompt, 0, std::move(buffers));
    } catch (...) {
      prompts_.erase(entry);
      throw;
    }
    texts_[prompt_text].hash = hash;
  }
  // The prompt's own text has the head already. The links of this text are those that end after the head, and the one
  // at the end of the head itself, which the first generated token will follow.
  const Tokens head = tail(prompt);
  const auto size = static_cast<std::uint32_t>(head.size());
  TextId id;
  try {
    id = add(State::kRunning, head, std::max(size, 1u) - 1);
  } catch (...) {
    if (texts_[prompt_text].users == 0) release(prompt_text);
    throw;
  }
  texts_[id].prompt = prompt_text;
  texts_[id].head = size;
  ++texts_[prompt_text].users;
  ++running_;
  return id;
}

bool LiveText::index_some(TextId id) {
  const TextId prompt = texts_[id].prompt;
  link(prompt, kSlice);
  return texts_[prompt].linked < texts_[prompt].tokens.size();
}

void LiveText::append(TextId id, Tokens tokens) {
  Text& text = texts_[id];
  assert(text.state == State::kRunning);
  const std::size_t before = text.tokens.size();
  try {
    if (before + tokens.size() > text.tokens.capacity()) {
      const std::size_t capacity = capacity_for(before + tokens.size(), texts_[text.prompt].hash + id);
      text.tokens.reserve(capacity);
      text.links.reserve(capacity);
      text.chunks.reserve((capacity + kChunk - 1) / kChunk);
    }
    text.tokens.insert(text.tokens.end(), tokens.begin(), tokens.end());
    make_room(id);
    link(id, SIZE_MAX);
  } catch (...) {
    text.tokens.resize(before);
    text.links.resize(std::min(before, text.links.size()));
    count(text);
    throw;
  }
}

// The capacity of a text of `size` tokens, which doubles as the text grows; `salt` chooses at which sizes. If it
// doubled at the same size for all, a step of 256 sessions of 32,768 tokens each could copy all their texts, which
// takes 40 ms.
std::size_t LiveText::capacity_for(std::size_t size, std::uint64_t salt) {
  constexpr std::size_t kLeast = 64, kSizes = 1024;
  std::size_t room = kLeast * (kSizes + salt * 617 % kSizes);
  while (room < size * kSizes) room *= 2;
  return room / kSizes;
}

// Allocates links and link numbers for all tokens of a text.
void LiveText::make_room(TextId id) {
  Text& text = texts_[id];
  const std::size_t chunks = (text.tokens.size() + kChunk - 1) / kChunk;
  text.links.resize(text.tokens.size());
  text.chunks.reserve(chunks > text.chunks.capacity() ? std::max(chunks, 2 * text.chunks.capacity()) : 0);
  while (text.chunks.size() < chunks) {
    if (free_chunks_.empty()) {
      owners_.emplace_back();
      try {
        free_chunks_.reserve(owners_.capacity());  // so that forgetting a text never allocates
      } catch (...) {
        owners_.pop_back();
        throw;
      }
      free_chunks_.push_back(static_cast<ChainIndex>(owners_.size() - 1));
    }
    owners_[free_chunks_.back()] = {id, static_cast<std::uint32_t>(text.chunks.size()) * kChunk};
    text.chunks.push_back(free_chunks_.back());
    free_chunks_.pop_back();
  }
  count(text);
}

// Makes at most `most` more tokens searchable; none if memory runs out.
void LiveText::link(TextId id, std::size_t most) {
  Text& text = texts_[id];
  const std::uint32_t before = text.linked;
  const auto end =
      static_cast<std::uint32_t>(std::min(text.tokens.size(), before + std::min(most, text.tokens.size())));
  try {
    for (; text.linked < end; ++text.linked) {
      const std::uint32_t i = text.linked;
      const ChainIndex index = index_of(text, i);
      ChainIndex& newest = newest_(text.tokens[i - 1], text.tokens[i]);
      text.links[i] = {newest, kNone};
      if (newest != kNone) link_of(newest).after = index;
      newest = index;
    }
  } catch (...) {
    while (text.linked > before) unlink(text, --text.linked);
    throw;
  }
}

void LiveText::unlink(Text& text, std::uint32_t i) {
  const auto [before, after] = text.links[i];
  if (before != kNone) link_of(before).after = after;
  if (after != kNone) {
    link_of(after).before = before;
  } else if (before != kNone) {
    newest_(text.tokens[i - 1], text.tokens[i]) = before;  // the table has the pair, so it does not allocate
  } else {
    newest_.erase(text.tokens[i - 1], text.tokens[i]);
  }
}

void LiveText::count(Text& text) {
  text_bytes_ -= text.counted;
  text.counted = text.tokens.capacity() * sizeof(Token) + text.links.capacity() * sizeof(Link) +
                 text.chunks.capacity() * sizeof(ChainIndex) + text.alternatives.capacity();
  text_bytes_ += text.counted;
}

void LiveText::finish(TextId id, std::int64_t epoch, std::vector<std::uint8_t> alternatives) {
  Text& text = texts_[id];
  assert(text.state == State::kRunning);
  text.state = State::kFinished;
  text.epoch = epoch;
  text.age = ++finishes_;
  text.earlier = last_finished_;
  (last_finished_ == kNoText ? first_finished_ : texts_[last_finished_].later) = id;
  last_finished_ = id;
  --running_;
  ++finished_responses_;
  finished_tokens_ += text.tokens.size() - text.head;
  text.alternatives = std::move(alternatives);
  count(text);
}

void LiveText::drop(TextId id) {
  assert(texts_[id].state == State::kRunning);
  --running_;
  release(id);
}

// Forgets the text. Its tokens stay until tidy() has unlinked them, because links of other texts link to its links.
void LiveText::release(TextId id) {
  Text& text = texts_[id];
  const TextId prompt = text.prompt;
  if (text.state == State::kPrompt) {
    const auto [first, last] = prompts_.equal_range(text.hash);
    prompts_.erase(std::find_if(first, last, [id](const auto& known) { return known.second == id; }));
  }
  text.state = State::kGoing;
  text.head = static_cast<std::uint32_t>(text.tokens.size());
  going_.push_back(id);
  if (prompt != kNoText && --texts_[prompt].users == 0) release(prompt);
}

void LiveText::free(TextId id) {
  Text& text = texts_[id];
  text_bytes_ -= text.counted;
  for (const ChainIndex chunk : text.chunks) {
    owners_[chunk] = {};
    free_chunks_.push_back(chunk);
  }
  if (text.counted >= kLargeText) {
    try {
      freed_.push_back({std::move(text.tokens), std::move(text.links), {}});
    } catch (const std::bad_alloc&) {  // then it is destroyed here, under the lock
    }
  }
  text = Text();
  free_.push_back(id);
}

std::shared_ptr<const void> LiveText::take_freed() {
  if (freed_.empty()) return nullptr;
  return std::make_shared<const std::vector<Buffers>>(std::exchange(freed_, {}));
}

bool LiveText::tidy(std::size_t work) {
  while (!going_.empty()) {
    Text& text = texts_[going_.back()];
    while (text.linked > text.first) {
      if (work == 0) return true;
      unlink(text, --text.linked);
      --work;
    }
    free(going_.back());
    going_.pop_back();
  }
  return false;
}

Tokens LiveText::generated(TextId id) const {
  const Text& text = texts_[id];
  return Tokens(text.tokens).subspan(text.head);
}

int LiveText::find(TextId own, Tokens context, std::span<Occurrence> out) const {
  if (context.size() < 2) return 0;
  const int limit = static_cast<int>(std::min<std::size_t>(out.size(), kCandidates));
  const int longest = static_cast<int>(std::min<std::size_t>(context.size(), kMaxOrder));
  const TextId prompt = texts_[own].prompt;
  int found = 0;
  int walked = 0;
  for (ChainIndex index = newest_.find(context[context.size() - 2], context.back());
       index != kNone && found < limit && walked < 2 * kCandidates; ++walked) {
    const Owner owner = owners_[index / kChunk];
    const Text& text = texts_[owner.text];
    const std::uint32_t i = owner.begin + index % kChunk, end = i + 1;
    const bool relevant = text.state == State::kRunning || text.state == State::kFinished || owner.text == prompt;
    if (relevant && end < text.tokens.size()) {
      const int most = std::min(longest, static_cast<int>(end));
      const int length = common_end(text.tokens.data() + end, context.data() + context.size(), most);
      out[found++] = {text.tokens[end], length, owner.text == own || owner.text == prompt};
    }
    index = text.links[i].before;
  }
  return found;
}

bool LiveText::holds(Tokens context) const {
  if (context.size() < 2) return false;
  int left = kHeldLinks;
  for (ChainIndex index = newest_.find(context[context.size() - 2], context.back()); index != kNone && left-- > 0;) {
    const Owner owner = owners_[index / kChunk];
    const Text& text = texts_[owner.text];
    const std::uint32_t i = owner.begin + index % kChunk, end = i + 1;
    const bool whole = text.state == State::kRunning || text.state == State::kFinished;
    if (whole && end >= context.size() &&
        std::equal(context.begin(), context.end(), text.tokens.begin() + end - context.size())) {
      return true;
    }
    index = text.links[i].before;
  }
  return false;
}

std::vector<LiveText::TextId> LiveText::finished_texts(std::size_t most) const {
  std::vector<TextId> ids;
  std::size_t tokens = 0;
  for (TextId id = first_finished_; id != kNoText; id = texts_[id].later) {
    tokens += texts_[id].tokens.size() - texts_[id].head;
    if (tokens > most && !ids.empty()) break;
    ids.push_back(id);
  }
  std::ranges::sort(ids, {}, [this](TextId id) { return std::pair(texts_[id].epoch, texts_[id].age); });
  return ids;
}

std::vector<ResponseView> LiveText::finished(std::size_t most) const {
  std::vector<ResponseView> views;
  for (TextId id : finished_texts(most)) {
    const Text& text = texts_[id];
    const Tokens all(text.tokens);
    views.push_back({all.first(text.head), all.subspan(text.head), {}, text.epoch, {}, text.alternatives});
  }
  return views;
}

void LiveText::dissolve(std::span<const TextId> ids) {
  for (TextId id : ids) {
    Text& text = texts_[id];
    assert(text.state == State::kFinished);
    (text.earlier == kNoText ? first_finished_ : texts_[text.earlier].later) = text.later;
    (text.later == kNoText ? last_finished_ : texts_[text.later].earlier) = text.earlier;
    --finished_responses_;
    finished_tokens_ -= text.tokens.size() - text.head;
    release(id);
  }
}

std::size_t LiveText::bytes() const {
  return sizeof(*this) + newest_.bytes() + (free_.capacity() + going_.capacity()) * sizeof(TextId) +
         texts_.capacity() * sizeof(Text) + owners_.capacity() * sizeof(Owner) +
         free_chunks_.capacity() * sizeof(ChainIndex) + prompts_.size() * kPromptNode +
         prompts_.bucket_count() * sizeof(void*) + text_bytes_;
}

}  // namespace histospec
