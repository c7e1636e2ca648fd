#include "registry/problem.h"

#include <algorithm>

namespace histospec {
namespace {

// Responses without epochs are taken as groups of this size.
constexpr std::size_t kGroup = 16;

constexpr std::size_t kPromptBytes = 128;  // its share of the namespace's Prompts

}  // namespace

ProblemKey::ProblemKey(std::string its_id, Tokens its_prompt)
    : id(std::move(its_id)),
      hash(id.empty() ? hash_key.of(its_prompt) : hash_key.of(id)),
      prompt_hash(id.empty() ? hash : hash_key.of(its_prompt)) {
  if (id.empty()) prompt.assign(its_prompt.begin(), its_prompt.end());
}

bool Problem::continued_by(Tokens prompt) const {
  constexpr std::size_t kBeginning = 4;  // tokens of a response that are enough to recognise it
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

void Holding::change(const Holding& before, const Holding& after) {
  bytes += after.bytes - before.bytes;
  problems += after.problems - before.problems;
  sessions += after.sessions - before.sessions;
  responses += after.responses - before.responses;
  tokens += after.tokens - before.tokens;
}

Holding Problem::holding(Part part) const {
  Holding held;
  switch (part) {
    case kItself:
      // 256: nodes of a tree and of the registry's lists, about 64 bytes each.
      held.bytes = sizeof(*this) + key.id.capacity() + key.prompt.capacity() * sizeof(Token) + 256 + kPromptBytes;
      held.problems = 1;
      break;
    case kSegments:
      held.bytes = segments->bytes();
      held.tokens = segments->tokens();
      for (const auto& segment : *segments) held.responses += segment->extents().size();
      break;
    case kLive:
      if (!live) break;
      held = {.bytes = live->bytes(),
              .sessions = live->running(),
              .responses = live->finished_responses(),
              .tokens = live->finished_tokens()};
      break;
    case kTwins:
      if (twins) held.bytes = twins->bytes();
      break;
  }
  return held;
}

}  // namespace histospec
