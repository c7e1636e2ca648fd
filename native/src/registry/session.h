// A session: a response that is being generated.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "draft/drafter.h"
#include "registry/namespace.h"
#include "registry/problem.h"

namespace histospec {

// Made by the thread that opens it; then guarded by the engine's lock.
struct Session {
  std::shared_ptr<Namespace> namespace_;
  std::shared_ptr<Problem> problem;
  std::size_t prompt_length;  // how many tokens of its prompt name its problem
  LiveText::TextId text;
  bool asked = false;                      // for a draft, since its last tokens came
  std::optional<Twins::Key> name_of_twin;  // of its own response, too
  std::weak_ptr<const Twin> twin;          // not its own: what is forgotten is gone
  DraftContext context;
  Draft draft;             // that is being verified now
  bool counted = true;     // its tokens; else the next report says how many were verified
  std::uint64_t step = 0;  // the last one that it was in
};

}  // namespace histospec
