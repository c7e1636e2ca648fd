// doctest, and how it prints the containers that tests compare.
#pragma once

#include <sstream>

#include "doctest/doctest.h"
#include "print.h"

template <histospec::testing::Compound T>
struct doctest::StringMaker<T> {
  static String convert(const T& value) {
    std::ostringstream out;
    histospec::testing::print(out, value);
    return out.str().c_str();
  }
};
