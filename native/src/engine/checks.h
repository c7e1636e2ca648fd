// Checks of arguments.
#pragma once

#include <stdexcept>
#include <string>

#include "histospec/types.h"

namespace histospec {

// Throws std::invalid_argument that names the first negative token.
inline void require_tokens(const std::string& field, Tokens tokens) {
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0) {
      throw std::invalid_argument(field + ": token " + std::to_string(tokens[i]) + " at " + std::to_string(i) +
                                  " is outside [0, 2147483647]");
    }
  }
}

}  // namespace histospec
