// Live text: the running sessions of one problem, and the responses that finished since its last segment was built.
//
// An online index: a token is searchable as soon as it is appended, one step after it was generated, by every sibling.
// For each pair of neighbouring tokens, `newest_` holds the newest place where it stands, and every place links to the
// one before it with the same pair (hash chains, as LZ77 compressors keep them). Looking a context up walks the newest
// kCandidates places and compares backwards, so that each yields its match length and the token that came next.
//
// Cost: 12 bytes a token and about 32 a distinct pair; append O(1); a look-up at most kCandidates short comparisons.
// It lives as long as its group: when no session of the problem is open, it is dissolved into a segment.
//
// Where memory runs out, open() and append() throw std::bad_alloc and have changed nothing.
//
// Threads: none of its own. The engine's lock guards it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "histospec/types.h"
#include "pair_table.h"

namespace histospec {

class LiveText {
 public:
  static constexpr int kCandidates = 8;

  using TextId = std::uint32_t;

  // A place where the last `length` >= 2 tokens of the context stand, followed by `next`.
  struct Match {
    Token next;
    int length;
    bool own;  // in the asking session's own text or prompt; else a sibling's
  };

  // Starts the text of a session. The prompt is context for this session and for all that share it.
  TextId open(Tokens prompt);
  void append(TextId text, Tokens tokens);
  // Keeps the text as a finished response, waiting for its segment.
  void finish(TextId text, std::int64_t epoch);
  // Forgets the text.
  void drop(TextId text);

  // The generated tokens.
  Tokens generated(TextId text) const;
  // The newest places where the context ends, newest first, at most kCandidates. `context` ends with what is to be
  // continued; `own` is the asking session's text. Fewer than 2 tokens match nothing. Returns how many were written.
  int find(TextId own, Tokens context, std::span<Match> matches) const;

  // Whether this context, of at least 2 tokens, stands in the text of a session or a finished response.
  bool holds(Tokens context) const;

  // The finished responses, by epoch and then in the order in which they finished; views into this object. dissolve()
  // forgets them.
  std::vector<ResponseView> finished() const;
  std::vector<TextId> finished_texts() const;
  void dissolve(std::span<const TextId> texts);

  std::size_t running() const { return running_; }
  std::size_t finished_responses() const { return finished_responses_; }
  std::size_t finished_tokens() const { return finished_tokens_; }
  std::size_t bytes() const;

 private:
  enum class State : std::uint8_t { kPrompt, kRunning, kFinished, kFree };

  using Place = PairTable::Place;

  struct Text {
    State state = State::kFree;
    TextId prompt = 0;        // the text that holds this one's prompt
    std::uint32_t head = 0;   // tokens before the generated ones
    std::uint32_t users = 0;  // of a prompt: texts that name it
    std::int64_t epoch = 0;
    std::uint64_t age = 0;        // finished texts in the order in which they finished
    std::size_t counted = 0;      // bytes of this text in text_bytes_
    std::size_t indexed = 0;      // tokens of this text in indexed_tokens_
    std::vector<Token> tokens;    // the end of the prompt, then what was generated
    std::vector<Place> previous;  // [i]: the place before this one with the same pair, of the pair that ends at i + 1
  };

  TextId allocate(State state);
  TextId add(State state, Tokens tokens, std::uint32_t first);
  void release(TextId text);
  void index(TextId text, std::uint32_t first);
  void sweep();

  std::vector<Text> texts_;
  std::vector<TextId> free_;
  PairTable newest_;
  std::uint64_t finishes_ = 0;
  std::size_t running_ = 0;
  std::size_t finished_responses_ = 0;
  std::size_t finished_tokens_ = 0;
  std::size_t indexed_tokens_ = 0;
  std::size_t dead_tokens_ = 0;
  std::size_t text_bytes_ = 0;
};

}  // namespace histospec
