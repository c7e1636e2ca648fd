// Which other namespaces know the prompts of one: two names for one run, or a new name for each epoch.
#pragma once

#include <string>

#include "registry/registry.h"

namespace histospec {

// Engine::shared_prompts. Takes the lock in slices.
SharedPrompts shared_prompts(Monitor& monitor, const Registry& registry, const std::string& name, std::size_t most);

}  // namespace histospec
