#include "threads/workers.h"

#include <atomic>
#include <chrono>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>

#include "check.h"

using namespace histospec;

namespace {

// How often each index was worked on, in one run.
std::vector<int> touched(Workers& workers, std::size_t size) {
  std::vector<int> times(size);  // each index belongs to one piece, so nobody shares an element
  workers.run(size, [&](int, std::size_t first, std::size_t last) {
    CHECK(first <= last && last <= size);
    for (std::size_t i = first; i < last; ++i) ++times[i];
  });
  return times;
}

}  // namespace

TEST(every_index_exactly_once) {
  for (int threads : {1, 2, 3, 5, 8, 64}) {
    Workers workers(threads);
    for (std::size_t size : {0, 1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 100, 255, 1000, 10000}) {
      check::subject = std::to_string(threads) + " threads, " + std::to_string(size);
      CHECK_EQ(touched(workers, size), std::vector<int>(size, 1));
    }
  }
}

TEST(many_runs_one_after_another) {
  Workers workers(4);
  for (std::size_t round = 0; round < 3000; ++round) {
    const std::size_t size = 32 + round % 40;
    CHECK_EQ(touched(workers, size), std::vector<int>(size, 1));
  }
}

// What the work wrote is there when run() returns, also for threads that worked in an earlier run.
TEST(results_are_there_on_return) {
  Workers workers(3);
  std::vector<std::uint64_t> sums(1000, 0);
  for (std::uint64_t round = 1; round <= 300; ++round) {
    workers.run(sums.size(), [&](int, std::size_t first, std::size_t last) {
      for (std::size_t i = first; i < last; ++i) sums[i] += i;
    });
    CHECK_EQ(std::accumulate(sums.begin(), sums.end(), std::uint64_t{0}), round * 999 * 1000 / 2);
  }
}

TEST(exceptions_come_out_and_the_next_run_works) {
  for (int threads : {1, 2, 5}) {
    Workers workers(threads);
    for (std::size_t size : {10u, 32u, 500u}) {
      for (std::size_t thrower : {std::size_t{0}, size / 2, size - 1}) {
        check::subject =
            std::to_string(threads) + " threads, " + std::to_string(thrower) + " of " + std::to_string(size);
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

TEST(one_of_many_exceptions_comes_out) {
  Workers workers(4);
  for (int round = 0; round < 100; ++round) {
    CHECK_THROWS(std::out_of_range,
                 workers.run(500, [](int, std::size_t, std::size_t) { throw std::out_of_range("all"); }));
    CHECK_EQ(touched(workers, 500), std::vector<int>(500, 1));
  }
}

// What belongs to a worker is used by one thread at a time, and, in the next run, after what was done to it before.
TEST(a_worker_is_one_thread) {
  for (int threads : {1, 2, 3, 8}) {
    Workers workers(threads);
    std::vector<std::uint64_t> done(threads, 0);  // no lock: the thread sanitizer would see two threads
    std::vector<std::atomic<int>> at_work(threads);
    for (std::uint64_t round = 1; round <= 200; ++round) {
      workers.run(100, [&](int worker, std::size_t first, std::size_t last) {
        CHECK(worker >= 0 && worker < threads);
        CHECK_EQ(at_work[worker]++, 0);
        done[worker] += last - first;
        --at_work[worker];
      });
      CHECK_EQ(std::accumulate(done.begin(), done.end(), std::uint64_t{0}), round * 100);
    }
  }
}

TEST(runs_that_were_announced_and_runs_that_do_not_come) {
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

TEST(ending_while_idle) {
  for (int round = 0; round < 100; ++round) {
    const Workers never_used(8);
    Workers small(8), used(8);
    touched(small, 5);  // too little to share
    touched(used, 100);
    if (round % 2 == 0) touched(used, 100);
  }
}

int main() { return check::main(); }
