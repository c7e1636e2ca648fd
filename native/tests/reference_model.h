// A naive model of the index that searches all text.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "histospec/types.h"

namespace histospec::testing {

inline std::vector<std::uint32_t> naive_suffix_array(const std::vector<std::uint32_t>& text) {
  std::vector<std::uint32_t> order(text.size());
  std::iota(order.begin(), order.end(), 0u);
  std::ranges::sort(order, [&](std::uint32_t a, std::uint32_t b) {
    return std::lexicographical_compare(text.begin() + a, text.end(), text.begin() + b, text.end());
  });
  return order;
}

// Nothing that could be drafted follows: the response ends, or the token was not generated.
inline constexpr Token kNothing = -1;

// A place in some responses: `length` tokens of the context stand before it, `next` follows.
struct Occurrence {
  Token next;
  std::int64_t offset;  // of `next` in its response; negative inside the head
  int length;           // how many of the context's last tokens stand here, at most kMaxOrder
};

// Every place at which at least the last token of `context` stands.
inline std::vector<Occurrence> occurrences(const std::vector<Response>& responses, Tokens context) {
  std::vector<Occurrence> out;
  for (const Response& r : responses) {
    const std::size_t head = std::min<std::size_t>(r.head.size(), kMaxOrder);
    std::vector<Token> text(r.head.end() - static_cast<std::ptrdiff_t>(head), r.head.end());
    text.insert(text.end(), r.tokens.begin(), r.tokens.end());
    for (std::size_t p = 1; p <= text.size(); ++p) {
      int length = 0;
      while (length < kMaxOrder && static_cast<std::size_t>(length) < std::min(p, context.size()) &&
             text[p - 1 - length] == context[context.size() - 1 - length]) {
        ++length;
      }
      if (length == 0) continue;
      const bool hidden = p >= head && p < text.size() && !r.generated.empty() && !r.generated[p - head];
      const auto offset = static_cast<std::int64_t>(p) - static_cast<std::int64_t>(head);
      out.push_back({p == text.size() || hidden ? kNothing : text[p], offset, length});
    }
  }
  return out;
}

inline bool operator==(const Response& a, const Response& b) {
  return a.head == b.head && a.tokens == b.tokens && a.generated == b.generated && a.epoch == b.epoch &&
         a.alternatives == b.alternatives;
}

// What an index gives back for a response: the end of the head, and no mask where all was generated.
inline Response normal(Response r) {
  if (r.head.size() > kMaxOrder) r.head.erase(r.head.begin(), r.head.end() - kMaxOrder);
  if (std::ranges::all_of(r.generated, [](std::uint8_t g) { return g != 0; })) r.generated.clear();
  for (std::uint8_t& g : r.generated) g = g != 0;
  return r;
}

}  // namespace histospec::testing
