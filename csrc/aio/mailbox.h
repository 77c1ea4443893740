// Mailbox: the numbers of requests that are done, for one thread that waits for many.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace dsx::aio {

class Mailbox {
 public:
  void put(int64_t number) {
    std::lock_guard lock(mutex_);
    numbers_.push_back(number);
    changed_.notify_one();
  }

  // Waits until there are some, and takes them; none when none came in that time.
  std::vector<int64_t> take(double seconds) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::duration<double>(seconds),
                      [&] { return !numbers_.empty(); });
    return std::exchange(numbers_, {});
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<int64_t> numbers_;
};

}  // namespace dsx::aio
