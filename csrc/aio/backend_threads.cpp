// Each op keeps one thread waiting in the kernel, so the depth is the number of threads.
#include "aio/backend_threads.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

namespace dsx::aio {
namespace {

constexpr int most_threads = 64;  // more only wait for each other

class ThreadsBackend final : public Backend {
 public:
  explicit ThreadsBackend(int depth) {
    const int count = std::min(depth, most_threads);
    try {
      for (int i = 0; i < count; ++i) threads_.emplace_back([this] { serve(); });
    } catch (...) {
      stop();
      throw;
    }
  }

  ~ThreadsBackend() override { stop(); }

  void submit(std::span<Op* const> ops) override {
    if (ops.empty()) return;
    {
      std::lock_guard lock(mutex_);
      todo_.insert(todo_.end(), ops.begin(), ops.end());
    }
    ops.size() == 1 ? has_work_.notify_one() : has_work_.notify_all();
  }

  void wait(std::vector<Op*>& completed) override {
    std::unique_lock lock(mutex_);
    has_news_.wait(lock, [this] { return !done_.empty() || woken_; });
    woken_ = false;
    completed.insert(completed.end(), done_.begin(), done_.end());
    done_.clear();
  }

  void wake() override {
    std::lock_guard lock(mutex_);
    woken_ = true;
    has_news_.notify_one();
  }

 private:
  void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      has_work_.wait(lock, [this] { return !todo_.empty() || stopped_; });
      if (todo_.empty()) return;
      Op* op = todo_.front();
      todo_.pop_front();
      lock.unlock();
      op->result = move_now(*op);
      lock.lock();
      done_.push_back(op);
      has_news_.notify_one();
    }
  }

  void stop() {
    {
      std::lock_guard lock(mutex_);
      stopped_ = true;
    }
    has_work_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  std::mutex mutex_;
  std::condition_variable has_work_, has_news_;
  std::deque<Op*> todo_;
  std::vector<Op*> done_;
  std::vector<std::thread> threads_;
  bool woken_ = false;
  bool stopped_ = false;
};

}  // namespace

std::unique_ptr<Backend> make_threads_backend(int depth) {
  return std::make_unique<ThreadsBackend>(depth);
}

}  // namespace dsx::aio
