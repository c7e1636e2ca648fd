// Checks of arguments.
#pragma once

#include <stdexcept>
#include <string>

#include "histospec/types.h"
#include "index/alternatives.h"

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

// Throws std::invalid_argument if these are no alternatives of a response with this many tokens.
inline void require_alternatives(const std::string& field, std::span<const std::uint8_t> alternatives,
                                 std::size_t tokens) {
  const std::string fault = PackedAlternatives::fault(alternatives, tokens);
  if (!fault.empty()) throw std::invalid_argument(field + ": " + fault);
}

}  // namespace histospec
