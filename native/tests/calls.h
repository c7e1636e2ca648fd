// Short forms of the engine's calls, for tests.
#pragma once

#include <string>
#include <vector>

#include "histospec/engine.h"

namespace histospec::testing {

inline void ingest(Engine& engine, const std::string& name, Tokens prompt,
                   const std::vector<std::vector<Token>>& responses, std::int64_t epoch = 0, const std::string& id = {},
                   std::optional<std::int64_t> seed = {}) {
  std::vector<ResponseView> views;
  for (const auto& tokens : responses) views.push_back({{}, tokens, {}, epoch, seed});
  engine.ingest(name, prompt, views, id);
}

// A step of one session.
inline StepResult step(Engine& engine, SessionId session, Tokens tokens, int max_tokens = 16,
                       float verify_cost = 0.01f) {
  const std::vector<SessionId> ids = {session};
  const std::vector<std::int64_t> offsets = {0, static_cast<std::int64_t>(tokens.size())};
  StepResult result;
  engine.step({ids, tokens, offsets, {}, max_tokens, verify_cost}, result);
  return result;
}

}  // namespace histospec::testing
