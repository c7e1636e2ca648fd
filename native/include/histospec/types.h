// Names that every part of the core shares.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <vector>

namespace histospec {

using Token = std::int32_t;
using Tokens = std::span<const Token>;

using SessionId = std::int64_t;

// The longest context, in tokens, that any source looks at.
inline constexpr int kMaxOrder = 32;

// The last kMaxOrder tokens of a text.
inline Tokens tail(Tokens text) { return text.size() > kMaxOrder ? text.last(kMaxOrder) : text; }

// A response that is about to be indexed. `head` is the end of the prompt (its last kMaxOrder tokens are enough): the
// context of the first tokens of the response.
struct ResponseView {
  Tokens head;
  Tokens tokens;
  std::span<const std::uint8_t> generated;  // empty: all of them; else one per token, 0 for tool and user turns
  std::int64_t epoch = 0;
  std::optional<std::int64_t> seed = {};            // of coupled sampling, if it was drawn with one
  std::span<const std::uint8_t> alternatives = {};  // see index/alternatives.h; empty: none
};

// A response that owns its tokens, as the index returns it.
struct Response {
  std::vector<Token> head;
  std::vector<Token> tokens;
  std::vector<std::uint8_t> generated;
  std::int64_t epoch = 0;
  std::vector<std::uint8_t> alternatives = {};

  ResponseView view() const { return {head, tokens, generated, epoch, {}, alternatives}; }
};

inline Response owned(const ResponseView& r) {
  return {{r.head.begin(), r.head.end()},
          {r.tokens.begin(), r.tokens.end()},
          {r.generated.begin(), r.generated.end()},
          r.epoch,
          {r.alternatives.begin(), r.alternatives.end()}};
}

// The session is not open: it was closed, was never opened, or belongs to an earlier process.
class UnknownSession : public std::out_of_range {
 public:
  using std::out_of_range::out_of_range;
};

}  // namespace histospec
