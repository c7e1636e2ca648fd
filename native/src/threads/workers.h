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
  // `threads`: how many threads work, the caller of run() included. They start when they are first needed.
  explicit Workers(int threads) : taken_(threads) {}
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  // Wakes the threads for a run() of this size that follows within a fraction of a millisecond, because waking takes
  // about as long.
  void announce(std::size_t size);
  // Calls work(worker, first, last) for pieces of [0, size), from this thread (worker 0) and those others that are
  // awake before all pieces are taken, and waits for these. So on a busy machine, only a thread that loses its core
  // within a piece delays a run. Every worker begins with its own part, which is the same in every run of this size,
  // and then helps the others. Rethrows the first exception of a worker. Only one call may run at a time.
  template <typename Work>
  void run(std::size_t size, const Work& work) {
    if (shared(size)) {
      share(size, std::ref(work));
    } else {
      work(0, std::size_t{0}, size);
    }
  }
  // How often a thread woke for an announcement or a run. Each announcement wakes every sleeping thread once.
  std::uint64_t woken() const { return woken_; }

 private:
  using Job = std::function<void(int, std::size_t, std::size_t)>;
  static constexpr std::size_t kPiece = 4;     // small, because at the end all threads wait for the last piece
  static constexpr std::size_t kWorthIt = 32;  // smaller runs end before other threads wake
  struct alignas(64) Taken {
    std::atomic<std::size_t> until = 0;  // in a worker's part
  };

  bool shared(std::size_t size) const { return taken_.size() > 1 && size >= kWorthIt; }
  void start();
  void share(std::size_t size, Job job);
  // The begin of a worker's part.
  std::size_t part(std::size_t worker) const { return size_ * worker / taken_.size(); }
  void take_pieces(int worker);
  void loop(int worker);

  std::mutex mutex_;
  std::condition_variable started_;
  std::condition_variable finished_;
  std::atomic<std::uint64_t> round_ = 0;  // number of the last run that was shared
  std::uint64_t announced_ = 0;           // number of the last announcement
  std::atomic<std::uint64_t> woken_ = 0;
  bool open_ = false;          // whether a thread may still join that run
  std::atomic<int> busy_ = 0;  // how many have joined it and not finished
  std::atomic<bool> stopping_ = false;
  Job job_;
  std::size_t size_ = 0;
  std::vector<Taken> taken_;  // how far each worker's part is taken
  std::exception_ptr failure_;
  std::vector<std::thread> others_;
};

}  // namespace histospec
