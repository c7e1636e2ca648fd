// The whole test framework: CHECK prints what failed, with values and the seed, and ends the process.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

namespace check {

// What the test was busy with, for the message: a seed, a step. Set it before the checks that it explains.
inline thread_local std::string subject;

template <typename T>
void print(std::ostream& out, const T& value) {
  if constexpr (requires { out << value; }) {
    out << +value;
  } else if constexpr (requires { value.begin(); }) {
    out << '[';
    std::size_t n = 0;
    for (const auto& item : value) {
      if (n++ > 0) out << ' ';
      if (n > 64) {
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

inline void print(std::ostream& out, const std::string& value) { out << '"' << value << '"'; }

[[noreturn]] inline void fail(const char* file, int line, const std::string& text) {
  std::cerr << file << ':' << line << ": " << text << (subject.empty() ? "" : "   [" + subject + "]") << std::endl;
  std::abort();  // so that fuzzers and debuggers stop here, too
}

template <typename A, typename B>
void equal(const A& a, const B& b, const char* text, const char* file, int line) {
  if (a == b) return;
  std::cerr << "left:  ";
  print(std::cerr, a);
  std::cerr << "\nright: ";
  print(std::cerr, b);
  std::cerr << '\n';
  fail(file, line, text);
}

struct Test {
  const char* name;
  void (*run)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

inline bool add(const char* name, void (*run)()) {
  tests().push_back({name, run});
  return true;
}

inline int main() {
  for (const Test& test : tests()) {
    std::cerr << test.name << std::endl;
    subject.clear();
    try {
      test.run();
    } catch (const std::exception& e) {
      fail(test.name, 0, std::string("unexpected exception: ") + e.what());
    }
  }
  return 0;
}

}  // namespace check

#define CHECK(condition)                                           \
  do {                                                             \
    if (!(condition)) check::fail(__FILE__, __LINE__, #condition); \
  } while (false)

#define CHECK_EQ(a, b) check::equal((a), (b), #a " == " #b, __FILE__, __LINE__)

// The expression must throw exactly this type, or one derived from it.
#define CHECK_THROWS(type, expression)                                              \
  do {                                                                              \
    bool thrown = false;                                                            \
    try {                                                                           \
      static_cast<void>(expression);                                                \
    } catch (const type&) {                                                         \
      thrown = true;                                                                \
    }                                                                               \
    if (!thrown) check::fail(__FILE__, __LINE__, "no " #type " from " #expression); \
  } while (false)

#define TEST(name)                                          \
  static void name();                                       \
  static const bool name##_added = check::add(#name, name); \
  static void name()
