// How one thread that sleeps in the kernel is woken by others: a descriptor that becomes readable,
// written only when the thread is really asleep.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <system_error>

namespace dsx::aio {

class WakeEvent {
 public:
  WakeEvent() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  }
  ~WakeEvent() { close(fd_); }
  WakeEvent(const WakeEvent&) = delete;
  WakeEvent& operator=(const WakeEvent&) = delete;

  int fd() const { return fd_; }  // the sleeper lets the kernel watch it

  // Any thread: the sleeper gets up, or does not fall asleep the next time.
  void wake() {
    if (state_.exchange(State::woken) == State::asleep) signal();
  }

  // The sleeper: false if it was woken before, and must not sleep.
  bool fall_asleep() {
    State expected = State::awake;
    return state_.compare_exchange_strong(expected, State::asleep);
  }

  // The sleeper: whether it was woken. What others wrote before that is visible now.
  bool get_up() { return state_.exchange(State::awake) == State::woken; }

  // Makes the descriptor readable, and no longer so. A signal may come late, after its sleeper got
  // up for another reason: it says nothing by itself, only the state does.
  void signal() {
    const uint64_t one = 1;
    while (write(fd_, &one, sizeof one) < 0 && errno == EINTR) {
    }
  }
  void drain() {
    uint64_t count = 0;
    while (read(fd_, &count, sizeof count) < 0 && errno == EINTR) {
    }
  }

 private:
  enum class State { awake, asleep, woken };

  int fd_;
  std::atomic<State> state_{State::awake};
};

}  // namespace dsx::aio
