// A session: a response while a worker generates it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "draft/drafter.h"
#include "registry/namespace.h"
#include "registry/problem.h"

namespace histospec {

// The thread that opens a session makes it; from then on the engine's lock guards it.
struct Session {
  std::shared_ptr<Namespace> namespace_;
  std::shared_ptr<Problem> problem;
  std::size_t prompt_length;  // how many tokens of its prompt identify its problem
  LiveText::TextId text;
  bool asked = false;                      // whether the worker asked for a draft since the last new tokens
  std::optional<Twins::Key> name_of_twin;  // the key of its twin, and later of its own response
  std::weak_ptr<const Twin> twin;          // weak: eviction may free it at any time
  // Counts its text, if it has a seed. Without it, because memory ran out, the session drafts as one without a seed.
  std::optional<PlaceCounter> places;
  DraftContext context;
  Draft draft;             // the last draft, which the worker verifies now
  bool counted = true;     // whether its tokens are counted as drafted; else the next report says how many to count
  std::uint64_t step = 0;  // the number of its last step

  std::size_t place_bytes() const { return places ? places->bytes() : 0; }
};

}  // namespace histospec
