#include "problem.h"

#include <algorithm>

namespace histospec {
namespace {

// Who names no epochs has groups, too.
constexpr std::size_t kGroup = 16;

constexpr std::size_t kPromptBytes = 128;  // what the namespace's Prompts keep of it

}  // namespace

std::size_t ProblemKeyHash::operator()(const ProblemKey& key) const {
  std::uint64_t hash = std::hash<std::string>()(key.id);
  for (Token token : key.prompt) {
    hash = (hash ^ static_cast<std::uint32_t>(token)) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 29;
  }
  return hash;
}

bool Problem::continued_by(Tokens prompt) const {
  constexpr std::size_t kBeginning = 4;  // tokens of a response that tell it
  if (prompt.size() < key.prompt.size() + kBeginning) return false;
  const Tokens context = tail(prompt.first(key.prompt.size() + kBeginning));
  const auto holds = [&](const auto& segment) {
    return segment->find(context).depth() == static_cast<int>(context.size());
  };
  return std::ranges::any_of(*segments, holds) || (live && live->holds(context));
}

bool Problem::shares(std::int64_t epoch, std::size_t responses) {
  if (shared_epoch_ && epoch <= *shared_epoch_ && not_shared_ + responses < kGroup) {
    not_shared_ += responses;
    return false;
  }
  shared_epoch_ = std::max(epoch, shared_epoch_.value_or(epoch));
  not_shared_ = responses - 1;
  return true;
}

std::size_t Problem::responses() const {
  std::size_t n = live ? live->finished_texts().size() : 0;
  for (const auto& segment : *segments) n += segment->extents().size();
  return n;
}

std::size_t Problem::history_tokens() const {
  std::size_t n = live ? live->finished_tokens() : 0;
  for (const auto& segment : *segments) n += segment->tokens();
  return n;
}

std::size_t Problem::segment_bytes() const {
  std::size_t bytes = sizeof(Segments) + 32 + segments->capacity() * sizeof(Segments::value_type);
  for (const auto& segment : *segments) bytes += segment->bytes();
  return bytes;
}

std::size_t Problem::own_bytes() const {
  // The key stands in the map, too; a node of the map and one of the recency list are about 64 bytes each.
  return sizeof(*this) + sizeof(ProblemKey) + 2 * (key.id.capacity() + key.prompt.capacity() * sizeof(Token)) + 192 +
         kPromptBytes;
}

}  // namespace histospec
