#include "threads/fair_mutex.h"

#include <condition_variable>
#include <thread>
#include <vector>

#include "check.h"

// Who waits is not told, but the tests have to know: explicit instantiations may name what is private.
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

TEST(one_at_a_time) {
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

TEST(in_the_order_in_which_it_was_asked_for) {
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

// A thread that takes it again and again does not keep another out.
TEST(who_waits_comes_before_the_holder_comes_again) {
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

TEST(works_with_condition_variables) {
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

int main() { return check::main(); }
