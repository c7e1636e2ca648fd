// The main function of every test program, with the one compiled copy of doctest.
//
// A failed check ends the run: most tests try hundreds of random inputs, and what follows a failed check may depend on
// it. `--abort-after=100` lets 100 fail.
#define DOCTEST_CONFIG_IMPLEMENT
#include "test.h"

namespace {

// doctest keeps the messages of INFO and CAPTURE in a vector. It gets its room here, so that tests which count
// allocations do not count it.
void make_room_for_messages() {
  INFO("one");
  INFO("two");
  INFO("three");
  INFO("four");
}

}  // namespace

int main(int argc, char** argv) {
  make_room_for_messages();
  doctest::Context context;
  context.setOption("abort-after", 1);
  context.applyCommandLine(argc, argv);
  return context.run();
}
