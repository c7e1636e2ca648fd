// Live text: the running sessions of one problem, and the responses that finished since its last segment was built.
//
// An online index: siblings can find a token as soon as it is appended, one step after it was generated. A link is a
// position of a pair of neighbouring tokens. `newest_` holds the newest link of each pair. Every link leads to the
// one before it with the same pair and to the one after it (hash chains, as in LZ77 compressors). A lookup walks the
// newest kCandidates links of the context's last pair and compares backwards. Each yields its match length and the
// token that followed.
//
// Places are numbered. A text takes kChunk numbers at a time, a chunk, and returns them when it is freed:
//
//     index            owners_[index / kChunk] -> text, and the token where the chunk begins
//     texts_[t]        tokens  t0 t1 t2 t3 …
//                      links      l1 l2 l3 …   [i]: of the pair that ends at token i
//
// Work in slices. A forgotten text is unlinked one by one, and a long prompt is made searchable piece by piece, so
// that the caller can release the lock in between. tidy() and index_some() do one slice.
//
// Cost: 12 bytes per token and about 32 per distinct pair; append O(1); a lookup at most kCandidates short comparisons.
// Live text exists as long as its group: when no session of the problem is open, it is dissolved into a segment.
//
// If memory runs out, open(), index_some() and append() throw std::bad_alloc and change nothing.
//
// Threads: none of its own. The engine's lock guards it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "histospec/types.h"
#include "live/pair_table.h"

namespace histospec {

class LiveText {
 public:
  static constexpr int kCandidates = 8;
  // How many tokens are made searchable, or unlinked, in about a millisecond.
  static constexpr std::size_t kSlice = 1 << 12;

  using TextId = std::uint32_t;
  using ChainIndex = PairTable::ChainIndex;
  static constexpr ChainIndex kNone = PairTable::kNone;

  struct Link {
    ChainIndex before = kNone;  // the newest of the older links with the same pair
    ChainIndex after = kNone;   // the oldest of the newer links with it
  };

  // A link where the last `match_length` >= 2 tokens of the context stand, followed by `next`.
  struct Occurrence {
    Token next;
    int match_length;
    bool own;  // in the asking session's own text or prompt; else a sibling's
  };

  // What is made of a prompt without the lock: its hash, and the arrays of a long one, because first access to memory
  // is slow. The arrays are empty for a short prompt.
  struct Buffers {
    std::vector<Token> tokens;
    std::vector<Link> links;
    std::optional<std::uint64_t> hash;
  };
  // `hash` is the prompt's (hash/keyed.h).
  static Buffers buffers_for(Tokens prompt, std::uint64_t hash);

  // Opens the text of a session. Sessions with the same prompt share its text. On return, kSlice tokens of a new prompt
  // are searchable; index_some() adds the rest. `buffers` is the result of buffers_for() or empty, and is used if the
  // prompt is new.
  TextId open(Tokens prompt, Buffers&& buffers = {});
  // Makes kSlice more tokens of the text's prompt searchable. Returns false when all are.
  bool index_some(TextId text);
  void append(TextId text, Tokens tokens);
  // Keeps the text as a finished response that waits for its segment, with its alternatives (index/alternatives.h).
  void finish(TextId text, std::int64_t epoch, std::vector<std::uint8_t> alternatives = {});
  // Forgets the text.
  void drop(TextId text);

  // The generated tokens.
  Tokens generated(TextId text) const;
  // Writes the newest links where the context ends, newest first, at most kCandidates. `own` is the text of the
  // session that drafts. A context of fewer than 2 tokens matches nothing. Returns how many links it wrote.
  int find(TextId own, Tokens context, std::span<Occurrence> out) const;

  // Whether the text of a session or a finished response contains this context of at least 2 tokens. It looks at the
  // newest links only.
  bool holds(Tokens context) const;

  // The first finished responses with at most `most` tokens together, at least one, sorted by epoch and then by the
  // order in which they finished. Views into this object; dissolve() forgets them.
  std::vector<ResponseView> finished(std::size_t most = SIZE_MAX) const;
  std::vector<TextId> finished_texts(std::size_t most = SIZE_MAX) const;
  void dissolve(std::span<const TextId> texts);

  // Frees forgotten texts, about `work` tokens of them. Returns false when nothing is left to do. Never allocates.
  bool tidy(std::size_t work = kSlice);
  // Returns the memory of large texts that tidy() freed, for the caller to destroy without the lock; null if there is
  // none.
  std::shared_ptr<const void> take_freed();

  std::size_t running() const { return running_; }
  std::size_t finished_responses() const { return finished_responses_; }
  std::size_t finished_tokens() const { return finished_tokens_; }
  std::size_t bytes() const;

 private:
  enum class State : std::uint8_t { kPrompt, kRunning, kFinished, kGoing, kFree };

  static constexpr TextId kNoText = UINT32_MAX;
  static constexpr std::uint32_t kChunk = 128;

  struct Owner {
    TextId text = kNoText;
    std::uint32_t begin = 0;  // the index of the token at which the first link of the chunk ends
  };
  struct Text {
    // The fields that a lookup reads, side by side.
    std::vector<Token> tokens;  // the end of the prompt, then the generated tokens
    std::vector<Link> links;    // [i]: of the link that ends at token i
    State state = State::kFree;
    std::uint32_t head = 0;    // tokens before the generated ones
    TextId prompt = kNoText;   // the text that holds this one's prompt
    std::uint32_t users = 0;   // of a prompt: how many texts have it
    std::uint32_t first = 1;   // the first token at which a link of this text ends
    std::uint32_t linked = 1;  // one past the last such token
    std::uint64_t hash = 0;    // of a prompt
    std::int64_t epoch = 0;
    std::uint64_t age = 0;                   // number among the finished texts
    TextId earlier = kNoText;                // of a finished text: the one that finished before it
    TextId later = kNoText;                  // and the one after it
    std::size_t counted = 0;                 // bytes of this text in text_bytes_
    std::vector<ChainIndex> chunks;          // numbers of its chunks
    std::vector<std::uint8_t> alternatives;  // of a finished text
  };

  TextId allocate(State state);
  TextId add(State state, Tokens tokens, std::uint32_t first, Buffers&& buffers = {});
  TextId find_prompt(Tokens prompt, std::uint64_t hash) const;
  void release(TextId text);
  void free(TextId text);
  static std::size_t capacity_for(std::size_t size, std::uint64_t salt);
  void make_room(TextId text);
  void link(TextId text, std::size_t most);
  void unlink(Text& text, std::uint32_t i);
  void count(Text& text);
  ChainIndex index_of(const Text& text, std::uint32_t i) const { return text.chunks[i / kChunk] * kChunk + i % kChunk; }
  Link& link_of(ChainIndex index) {
    const Owner& owner = owners_[index / kChunk];
    return texts_[owner.text].links[owner.begin + index % kChunk];
  }

  std::vector<Text> texts_;
  std::vector<TextId> free_;                           // has room for all texts, so that forgetting never allocates
  std::vector<TextId> going_;                          // has room, too; forgotten texts that are still linked
  std::vector<Owner> owners_ = std::vector<Owner>(1);  // by chunk; the first one contains kNone
  std::vector<ChainIndex> free_chunks_;
  std::vector<Buffers> freed_;
  std::unordered_multimap<std::uint64_t, TextId> prompts_;
  PairTable newest_;
  TextId first_finished_ = kNoText;
  TextId last_finished_ = kNoText;
  std::uint64_t finishes_ = 0;
  std::size_t running_ = 0;
  std::size_t finished_responses_ = 0;
  std::size_t finished_tokens_ = 0;
  std::size_t text_bytes_ = 0;
};

}  // namespace histospec
