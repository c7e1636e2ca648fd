// Threads that share the work on one batch.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace histospec {

class Workers {
 public:
  // `threads`: of them all, the caller of run() included. None is started before it is needed.
  explicit Workers(int threads) : taken_(threads) {}
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  // A run() of this size is to come within a fraction of a millisecond: a sleeping thread needs about as long to wake.
  void announce(std::size_t size) {
    if (!shared(size)) return;
    start();
    wake();
  }
  // Calls work(worker, first, last) for pieces that make up [0, size), from this thread (worker 0) and the others, and
  // waits for all of them. Every worker begins with its own part, the same one in every run of this size, and then
  // helps the others. Throws what the first of them threw. One call at a time.
  template <typename Work>
  void run(std::size_t size, const Work& work) {
    if (shared(size)) {
      share(size, std::ref(work));
    } else {
      work(0, std::size_t{0}, size);
    }
  }

 private:
  using Job = std::function<void(int, std::size_t, std::size_t)>;
  static constexpr std::size_t kPiece = 4;     // small: at the end, everybody waits for one of them
  static constexpr std::size_t kWorthIt = 32;  // less is done sooner than others wake
  struct alignas(64) Taken {
    std::atomic<std::size_t> until = 0;  // of a worker's part
  };

  bool shared(std::size_t size) const { return taken_.size() > 1 && size >= kWorthIt; }
  void start();
  void wake();
  void share(std::size_t size, Job job);
  // Where the part of a worker begins.
  std::size_t part(std::size_t worker) const { return size_ * worker / taken_.size(); }
  void take_pieces(int worker);
  void loop(int worker);

  std::mutex mutex_;
  std::condition_variable started_;
  std::condition_variable finished_;
  std::atomic<std::uint64_t> round_ = 0;
  bool announced_ = false;
  std::atomic<int> busy_ = 0;
  std::atomic<bool> stopping_ = false;
  Job job_;
  std::size_t size_ = 0;
  std::vector<Taken> taken_;  // of each worker
  std::exception_ptr failure_;
  std::vector<std::thread> others_;
};

}  // namespace histospec
