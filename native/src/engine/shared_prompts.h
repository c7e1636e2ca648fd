// Looks the prompts of one namespace up in the others, to find runs with two names, or with a new name for each epoch.
#pragma once

#include <string>

#include "registry/registry.h"

namespace histospec {

// See Engine::shared_prompts. Takes the lock in slices.
SharedPrompts shared_prompts(Monitor& monitor, const Registry& registry, const std::string& name, std::size_t most);

}  // namespace histospec
