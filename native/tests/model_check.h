// Checks for code that runs in tests and in the fuzzer, without a test framework. A failed check throws Difference,
// which fails the test case in doctest and ends the process in the fuzzer.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

#include "print.h"

namespace histospec::testing {

class Difference : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

// What the model is busy with, for the message.
inline thread_local std::string subject;

[[noreturn]] inline void differ(const char* file, int line, const std::string& what) {
  throw Difference(std::string(file) + ':' + std::to_string(line) + ": " + what + "   [" + subject + ']');
}

template <typename A, typename B>
void check_equal(const A& a, const B& b, const char* expression, const char* file, int line) {
  if (a == b) return;
  std::ostringstream out;
  out << expression << "\n  left:  ";
  print(out, a);
  out << "\n  right: ";
  print(out, b);
  differ(file, line, out.str());
}

}  // namespace histospec::testing

#define MODEL_CHECK(condition)                                                    \
  do {                                                                            \
    if (!(condition)) histospec::testing::differ(__FILE__, __LINE__, #condition); \
  } while (false)

#define MODEL_CHECK_EQ(a, b) histospec::testing::check_equal((a), (b), #a " == " #b, __FILE__, __LINE__)

// The expression must throw exactly this type, or one derived from it.
#define MODEL_CHECK_THROWS(type, expression)                                                       \
  do {                                                                                             \
    bool thrown = false;                                                                           \
    try {                                                                                          \
      static_cast<void>(expression);                                                               \
    } catch (const type&) {                                                                        \
      thrown = true;                                                                               \
    }                                                                                              \
    if (!thrown) histospec::testing::differ(__FILE__, __LINE__, "no " #type " from " #expression); \
  } while (false)
