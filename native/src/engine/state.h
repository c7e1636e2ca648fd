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
        registry(ledger, options.namespace_tokens),
        evictor(options.memory_bytes, monitor, ledger, registry, contents),
        merger(options, ledger, contents, evictor),
        steps(options.threads, ledger, registry, contents),
        builder(options.memory_bytes, monitor, ledger, registry, contents, evictor, merger),
        housekeeper(monitor, contents, evictor) {}

  const std::size_t budget;
  Monitor monitor;
  MemoryLedger ledger;
  Registry registry;
  Contents contents{monitor, ledger, registry};
  Evictor evictor;
  Merger merger;
  StepRunner steps;
  // Each of these has a thread.
  Builder builder;
  Housekeeper housekeeper;
};

}  // namespace histospec
