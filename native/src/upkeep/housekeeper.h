// The housekeeper: a thread that evicts, tidies live text and frees memory, if that takes longer than a caller should
// wait.
#pragma once

#include <thread>

#include "upkeep/evictor.h"

namespace histospec {

class Housekeeper {
 public:
  Housekeeper(Monitor& monitor, Contents& contents, Evictor& evictor);
  ~Housekeeper();
  Housekeeper(const Housekeeper&) = delete;
  Housekeeper& operator=(const Housekeeper&) = delete;

  bool idle() const REQUIRES(engine_lock) { return !contents_.untidy() && !evictor_.behind(); }

 private:
  void run();

  Monitor& monitor_;
  Contents& contents_;
  Evictor& evictor_;
  bool stopping_ GUARDED_BY(engine_lock) = false;
  std::thread thread_;  // last, because it uses all members above
};

}  // namespace histospec
