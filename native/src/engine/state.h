// The parts of an engine. Each part knows only those before it.
#pragma once

#include "engine/step.h"
#include "histospec/engine.h"
#include "registry/registry.h"
#include "upkeep/builder.h"

namespace histospec {

struct Engine::State {
  explicit State(const EngineOptions& options)
      : budget(options.memory_bytes),
        contents(options.namespace_tokens),
        evictor(options.memory_bytes, contents),
        merger(options, contents, evictor),
        steps(options.threads, contents),
        builder(options.memory_bytes, contents, evictor, merger),
        housekeeper(contents, evictor) {}

  const std::size_t budget;
  Contents contents;
  Monitor& monitor = contents.monitor;
  MemoryLedger& ledger = contents.ledger;
  Registry& registry = contents.registry;
  Evictor evictor;
  Merger merger;
  StepRunner steps;
  // Each of these has a thread.
  Builder builder;
  Housekeeper housekeeper;
};

}  // namespace histospec
