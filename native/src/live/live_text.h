// Live text: the running sessions of one problem, and the responses that finished since its last segment was built.
//
// An online index: a token is searchable as soon as it is appended, one step after it was generated, by every sibling.
// A place is where a pair of neighbouring tokens stands. `newest_` holds the newest place of each pair, and every place
// links to the one before it with the same pair and to the one after it (hash chains, as LZ77 compressors keep them).
// Looking a context up walks the newest kCandidates places and compares backwards, so that each yields its match length
// and the token that came next.
//
// Places are numbered. A text takes numbers by the chunk, kChunk at a time, and gives them back when it goes:
//
//     place            owners_[place / kChunk] -> text, and where in it the chunk begins
//     texts_[t]        tokens  t0 t1 t2 t3 …
//                      links      l1 l2 l3 …   [i]: of the pair that ends at token i
//
// Work in slices. A text that goes is unlinked place by place, and a long prompt is made searchable piece by piece, so
// that the holder of the lock may let others in between: tidy() and index_some() say how much is to be done at
// once.
//
// Cost: 12 bytes a token and about 32 a distinct pair; append O(1); a look-up at most kCandidates short comparisons.
// It lives as long as its group: when no session of the problem is open, it is dissolved into a segment.
//
// Where memory runs out, open(), index_some() and append() throw std::bad_alloc and have changed nothing.
//
// Threads: none of its own. The engine's lock guards it.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "histospec/types.h"
#include "live/pair_table.h"

namespace histospec {

class LiveText {
 public:
  static constexpr int kCandidates = 8;
  // Tokens that are made searchable, or unlinked, in about a millisecond.
  static constexpr std::size_t kSlice = 1 << 12;

  using TextId = std::uint32_t;
  using Place = PairTable::Place;
  static constexpr Place kNone = PairTable::kNone;

  struct Link {
    Place before = kNone;  // the newest of the older places with the same pair
    Place after = kNone;   // the oldest of the newer ones
  };

  // A place where the last `match_length` >= 2 tokens of the context stand, followed by `next`.
  struct Occurrence {
    Token next;
    int match_length;
    bool own;  // in the asking session's own text or prompt; else a sibling's
  };

  // What a long prompt will stand in, made and filled outside of the lock: memory that is touched for the first time is
  // slow. Empty for a short one.
  struct Buffers {
    std::vector<Token> tokens;
    std::vector<Link> links;
  };
  static Buffers buffers_for(Tokens prompt);

  // Starts the text of a session. The prompt is context for this session and for all that share it; kSlice tokens of a
  // new one are searchable on return, and the rest after index_some(). `buffers` are those for this prompt,
  // or empty, and taken only where the prompt is new.
  TextId open(Tokens prompt, Buffers&& buffers = {});
  // Makes kSlice more tokens of the text's prompt searchable. False when all of them are.
  bool index_some(TextId text);
  void append(TextId text, Tokens tokens);
  // Keeps the text as a finished response, waiting for its segment.
  void finish(TextId text, std::int64_t epoch);
  // Forgets the text.
  void drop(TextId text);

  // The generated tokens.
  Tokens generated(TextId text) const;
  // The newest places where the context ends, newest first, at most kCandidates. `context` ends with what is to be
  // continued; `own` is the asking session's text. Fewer than 2 tokens match nothing. Returns how many were written.
  int find(TextId own, Tokens context, std::span<Occurrence> out) const;

  // Whether this context, of at least 2 tokens, stands in the text of a session or a finished response.
  bool holds(Tokens context) const;

  // The finished responses, by epoch and then in the order in which they finished: as many of those that finished first
  // as have `most` tokens, at least one. Views into this object; dissolve() forgets them.
  std::vector<ResponseView> finished(std::size_t most = SIZE_MAX) const;
  std::vector<TextId> finished_texts(std::size_t most = SIZE_MAX) const;
  void dissolve(std::span<const TextId> texts);

  // Gives back what forgotten texts held, in the order of about `work` tokens. False when nothing is left to do. Never
  // allocates.
  bool tidy(std::size_t work = kSlice);
  // The memory of large texts that tidy() freed, to be destroyed outside of the lock; null if there is none.
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
    std::uint32_t begin = 0;  // the token that the first place of the chunk ends at
  };
  struct Text {
    // What a look-up reads, side by side.
    std::vector<Token> tokens;  // the end of the prompt, then what was generated
    std::vector<Link> links;    // [i]: of the place that ends at token i
    State state = State::kFree;
    std::uint32_t head = 0;    // tokens before the generated ones
    TextId prompt = kNoText;   // the text that holds this one's prompt
    std::uint32_t users = 0;   // of a prompt: texts that name it
    std::uint32_t first = 1;   // the first token that a place of this text ends at
    std::uint32_t linked = 1;  // one past the last
    std::uint64_t hash = 0;    // of a prompt
    std::int64_t epoch = 0;
    std::uint64_t age = 0;     // how many had finished before
    TextId earlier = kNoText;  // of finished texts, the ones that finished before and after it
    TextId later = kNoText;
    std::size_t counted = 0;    // bytes of this text in text_bytes_
    std::vector<Place> chunks;  // numbers of its chunks
  };

  TextId allocate(State state);
  TextId add(State state, Tokens tokens, std::uint32_t first, Buffers&& buffers = {});
  TextId find_prompt(Tokens prompt, std::uint64_t hash) const;
  void release(TextId text);
  void free(TextId text);
  void make_room(TextId text);
  void link(TextId text, std::size_t most);
  void unlink(Text& text, std::uint32_t i);
  void count(Text& text);
  Place place_of(const Text& text, std::uint32_t i) const { return text.chunks[i / kChunk] * kChunk + i % kChunk; }
  Link& link_of(Place place) {
    const Owner& owner = owners_[place / kChunk];
    return texts_[owner.text].links[owner.begin + place % kChunk];
  }

  std::vector<Text> texts_;
  std::vector<TextId> free_;                           // neither of these two allocates when a text goes
  std::vector<TextId> going_;                          // forgotten, and still linked
  std::vector<Owner> owners_ = std::vector<Owner>(1);  // by chunk; the first holds kNone
  std::vector<Place> free_chunks_;
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
