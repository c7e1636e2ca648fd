// Values as text, for the messages of failed checks.
#pragma once

#include <cstddef>
#include <ostream>
#include <string>

namespace histospec::testing {

// A container of values, or a pair of them.
template <typename T>
concept Compound = !requires(std::ostream& out, const T& value) { out << value; } &&
                   (requires(const T& value) { value.begin(); } || requires(const T& value) { value.first; });

template <typename T>
void print(std::ostream& out, const T& value) {
  constexpr std::size_t kMost = 64;  // of a container
  if constexpr (requires { +value; }) {
    out << +value;  // a std::uint8_t is a number
  } else if constexpr (requires { out << value; }) {
    out << value;
  } else if constexpr (requires { value.begin(); }) {
    out << '[';
    std::size_t n = 0;
    for (const auto& item : value) {
      if (n > 0) out << ' ';
      if (n++ == kMost) {
        out << "… " << value.size() << " in all";
        break;
      }
      print(out, item);
    }
    out << ']';
  } else if constexpr (requires { value.first; }) {
    print(out, value.first);
    out << ':';
    print(out, value.second);
  } else {
    out << '?';
  }
}

}  // namespace histospec::testing
