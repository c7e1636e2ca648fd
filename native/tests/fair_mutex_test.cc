#include <condition_variable>
#include <thread>
#include <vector>

#include "registry/monitor.h"
#include "test.h"

// The mutex does not tell how many threads wait, and the tests have to know: explicit instantiations may name private
// members.
namespace histospec {
std::uint64_t asked_for(FairMutex&);
template <auto mutex, auto next>
struct Opened {
  friend std::uint64_t asked_for(FairMutex& m) {
    const std::lock_guard guard(m.*mutex);
    return m.*next;
  }
};
template struct Opened<&FairMutex::mutex_, &FairMutex::next_>;
}  // namespace histospec

using namespace histospec;

namespace {

void wait_until_asked_for(FairMutex& mutex, std::uint64_t times) {
  while (asked_for(mutex) < times) std::this_thread::yield();
}

}  // namespace

TEST_CASE("One thread at a time holds the mutex") {
  FairMutex mutex;
  constexpr int kThreads = 6, kRounds = 500;
  int inside = 0, total = 0;  // plain: the mutex is all that guards them
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < kRounds; ++i) {
        const std::lock_guard lock(mutex);
        CHECK_EQ(++inside, 1);
        ++total;
        --inside;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(total, kThreads * kRounds);
}

TEST_CASE("Threads get the mutex in the order in which they asked") {
  constexpr int kThreads = 8;
  for (int round = 0; round < 30; ++round) {
    FairMutex mutex;
    std::vector<int> order;
    std::vector<std::thread> threads;
    mutex.lock();
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        const std::lock_guard lock(mutex);
        order.push_back(t);
      });
      wait_until_asked_for(mutex, static_cast<std::uint64_t>(t) + 2);
    }
    CHECK(order.empty());
    mutex.unlock();
    mutex.lock();  // asks last, although it is the quickest
    order.push_back(kThreads);
    mutex.unlock();
    for (std::thread& thread : threads) thread.join();
    std::vector<int> expected;
    for (int t = 0; t <= kThreads; ++t) expected.push_back(t);
    CHECK_EQ(order, expected);
  }
}

TEST_CASE("A waiting thread comes before the holder comes again") {
  FairMutex mutex;
  bool came = false;
  for (std::uint64_t round = 0; round < 200; ++round) {
    came = false;
    const std::uint64_t before = asked_for(mutex);
    mutex.lock();
    std::thread other([&] {
      const std::lock_guard lock(mutex);
      came = true;
    });
    wait_until_asked_for(mutex, before + 2);
    mutex.unlock();
    mutex.lock();
    CHECK(came);
    mutex.unlock();
    other.join();
  }
}

TEST_CASE("The mutex works with condition variables") {
  FairMutex mutex;
  std::condition_variable_any changed;
  int turn = 0;
  constexpr int kRounds = 200;
  const auto play = [&](int mine) {
    for (int i = 0; i < kRounds; ++i) {
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return turn % 2 == mine; });
      ++turn;
      changed.notify_all();
    }
  };
  std::thread other([&] { play(1); });
  play(0);
  other.join();
  CHECK_EQ(turn, 2 * kRounds);
}
