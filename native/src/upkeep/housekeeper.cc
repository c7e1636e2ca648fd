#include "upkeep/housekeeper.h"

namespace histospec {

Housekeeper::Housekeeper(Monitor& monitor, Contents& contents, Evictor& evictor)
    : monitor_(monitor), contents_(contents), evictor_(evictor), thread_([this] { run(); }) {}

Housekeeper::~Housekeeper() {
  {
    const Monitor::Lock lock(monitor_);
    stopping_ = true;
  }
  monitor_.to_tidy.notify_all();
  thread_.join();
}

void Housekeeper::run() {
  Monitor::Lock lock(monitor_);
  while (true) {
    monitor_.to_tidy.wait(lock,
                          [this]() REQUIRES(engine_lock) { return stopping_ || !idle() || monitor_.discarded_much(); });
    if (stopping_) return;
    monitor_.destroy_discarded(lock);
    evictor_.catch_up();
    contents_.tidy_next();
    if (idle()) monitor_.idle.notify_all();
    Monitor::breathe(lock);
  }
}

}  // namespace histospec
