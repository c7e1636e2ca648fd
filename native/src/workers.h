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
  explicit Workers(int threads) : threads_(threads) {}
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  // Calls work(worker, first, last) for pieces that make up [0, size), from this thread (worker 0) and the others, and
  // waits for all of them. Throws what the first of them threw. One call at a time.
  template <typename Work>
  void run(std::size_t size, const Work& work) {
    if (threads_ == 1 || size < 2 * kPiece) {
      work(0, std::size_t{0}, size);
      return;
    }
    share(size, std::ref(work));
  }

 private:
  using Job = std::function<void(int, std::size_t, std::size_t)>;
  // Small enough to even out what takes longer, large enough to keep the sessions of a problem on one core.
  static constexpr std::size_t kPiece = 16;

  void share(std::size_t size, Job job);
  void take_pieces(int worker);
  void loop(int worker);

  const int threads_;
  std::mutex mutex_;
  std::condition_variable started_;
  std::condition_variable finished_;
  std::uint64_t round_ = 0;
  int busy_ = 0;
  bool stopping_ = false;
  Job job_;
  std::size_t size_ = 0;
  std::atomic<std::size_t> taken_ = 0;
  std::exception_ptr failure_;
  std::vector<std::thread> others_;
};

}  // namespace histospec
