#include "threads/workers.h"

#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <fstream>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>

#include "test.h"

using namespace histospec;

namespace {

// How often each index was worked on, in one run.
std::vector<int> touched(Workers& workers, std::size_t size) {
  std::vector<int> times(size);  // each index belongs to one piece, so no two threads write one element
  workers.run(size, [&](int, std::size_t first, std::size_t last) {
    CHECK(first <= last);
    CHECK(last <= size);
    for (std::size_t i = first; i < last; ++i) ++times[i];
  });
  return times;
}

std::array<int, 2> gate;  // a pipe; threads in hold_here() wait for a byte
std::atomic<bool> held = false;

void hold_here(int) {
  held = true;
  char byte;
  while (read(gate[0], &byte, 1) != 1) {
  }
}

// Whether a thread sleeps, by Linux's /proc.
bool asleep(long thread) {
  std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/stat");
  std::string stat;
  std::getline(file, stat);
  const std::size_t end = stat.rfind(')');  // of the thread's name
  return end != std::string::npos && stat.substr(end, 3) == ") S";
}

}  // namespace

TEST_CASE("Every index is worked on exactly once") {
  for (int threads : {1, 2, 3, 5, 8, 64}) {
    Workers workers(threads);
    for (std::size_t size : {0, 1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 100, 255, 1000, 10000}) {
      INFO(threads, " threads, ", size, " indices");
      CHECK_EQ(touched(workers, size), std::vector<int>(size, 1));
    }
  }
}

TEST_CASE("Many runs can follow one another") {
  Workers workers(4);
  for (std::size_t round = 0; round < 3000; ++round) {
    const std::size_t size = 32 + round % 40;
    CHECK_EQ(touched(workers, size), std::vector<int>(size, 1));
  }
}

// Also for threads that worked in an earlier run.
TEST_CASE("Results are there when run() returns") {
  Workers workers(3);
  std::vector<std::uint64_t> sums(1000, 0);
  for (std::uint64_t round = 1; round <= 300; ++round) {
    workers.run(sums.size(), [&](int, std::size_t first, std::size_t last) {
      for (std::size_t i = first; i < last; ++i) sums[i] += i;
    });
    CHECK_EQ(std::accumulate(sums.begin(), sums.end(), std::uint64_t{0}), round * 999 * 1000 / 2);
  }
}

TEST_CASE("run() throws what a piece threw, and the next run works") {
  for (int threads : {1, 2, 5}) {
    Workers workers(threads);
    for (std::size_t size : {10u, 32u, 500u}) {
      for (std::size_t thrower : {std::size_t{0}, size / 2, size - 1}) {
        INFO(threads, " threads, piece of ", thrower, " of ", size);
        std::atomic<int> at_work{0};
        std::string message;
        try {
          workers.run(size, [&](int, std::size_t first, std::size_t last) {
            ++at_work;
            if (first <= thrower && thrower < last) {
              --at_work;
              throw std::runtime_error("piece of " + std::to_string(thrower));
            }
            --at_work;
          });
        } catch (const std::runtime_error& e) {
          message = e.what();
        }
        CHECK_EQ(message, "piece of " + std::to_string(thrower));
        CHECK_EQ(at_work.load(), 0);
        CHECK_EQ(touched(workers, size), std::vector<int>(size, 1));
      }
    }
  }
}

TEST_CASE("run() throws one of many exceptions") {
  Workers workers(4);
  for (int round = 0; round < 100; ++round) {
    CHECK_THROWS_AS(workers.run(500, [](int, std::size_t, std::size_t) { throw std::out_of_range("all"); }),
                    std::out_of_range);
    CHECK_EQ(touched(workers, 500), std::vector<int>(500, 1));
  }
}

// The next run sees what the worker did in the last one.
TEST_CASE("A worker is one thread at a time") {
  for (int threads : {1, 2, 3, 8}) {
    Workers workers(threads);
    std::vector<std::uint64_t> done(threads, 0);  // no lock: the thread sanitizer would see two threads
    std::vector<std::atomic<int>> at_work(threads);
    for (std::uint64_t round = 1; round <= 200; ++round) {
      workers.run(100, [&](int worker, std::size_t first, std::size_t last) {
        CHECK(worker >= 0);
        CHECK(worker < threads);
        CHECK_EQ(at_work[worker]++, 0);
        done[worker] += last - first;
        --at_work[worker];
      });
      CHECK_EQ(std::accumulate(done.begin(), done.end(), std::uint64_t{0}), round * 100);
    }
  }
}

TEST_CASE("Runs may come announced or not, and announced runs need not come") {
  for (int threads : {1, 2, 5}) {
    Workers workers(threads);
    for (std::size_t round = 0; round < 300; ++round) {
      const std::size_t size = round % 3 == 0 ? 5 : 100;
      workers.announce(size);
      if (round % 50 == 7) std::this_thread::sleep_for(std::chrono::milliseconds(3));  // they sleep again
      if (round % 4 != 1) CHECK_EQ(touched(workers, size), std::vector<int>(size, 1));
    }
    workers.announce(100);  // and then the end
  }
}

TEST_CASE("An announcement wakes every thread") {
  constexpr int kThreads = 5;
  Workers workers(kThreads);
  for (std::uint64_t announced = 1; announced <= 20; ++announced) {
    CAPTURE(announced);
    workers.announce(100);
    const std::uint64_t all = announced * (kThreads - 1);
    const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    while (workers.woken() < all && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    CHECK_EQ(workers.woken(), all);
  }
}

// As on a busy machine, where a thread that was woken gets no core. A signal handler holds the thread.
TEST_CASE("A run does not wait for a thread that takes no part in it") {
  REQUIRE_EQ(pipe(gate.data()), 0);
  struct sigaction hold = {}, before;
  hold.sa_handler = hold_here;
  REQUIRE_EQ(sigaction(SIGUSR1, &hold, &before), 0);
  {
    Workers workers(2);
    pthread_t other{};
    std::atomic<long> number = 0;
    while (number == 0) {  // it may come too late for a run
      workers.run(1000, [&](int worker, std::size_t, std::size_t) {
        if (worker == 1 && number == 0) {
          other = pthread_self();
          number = syscall(SYS_gettid);
        }
        std::this_thread::yield();
      });
    }
    while (!asleep(number)) std::this_thread::yield();  // until it waits for the next run, without the lock
    REQUIRE_EQ(pthread_kill(other, SIGUSR1), 0);
    while (!held) std::this_thread::yield();
    std::atomic<bool> over = false, gave_up = false;
    std::thread watch([&] {
      for (int tenth = 0; tenth < 600 && !over; ++tenth) std::this_thread::sleep_for(std::chrono::milliseconds(100));
      gave_up = !over;
      CHECK_EQ(write(gate[1], "x", 1), 1);
    });
    CHECK_EQ(touched(workers, 100), std::vector<int>(100, 1));
    over = true;
    watch.join();
    CHECK_FALSE(gave_up.load());
    CHECK_EQ(touched(workers, 100), std::vector<int>(100, 1));
  }
  sigaction(SIGUSR1, &before, nullptr);
  close(gate[0]);
  close(gate[1]);
}

TEST_CASE("Idle workers can be destroyed") {
  for (int round = 0; round < 100; ++round) {
    const Workers never_used(8);
    Workers small(8), used(8);
    touched(small, 5);  // too little to share
    touched(used, 100);
    if (round % 2 == 0) touched(used, 100);
  }
}
