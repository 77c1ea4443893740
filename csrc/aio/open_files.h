// OpenFiles: how many files an engine has opened for its requests, and who waits for one to close.
#pragma once

#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <utility>

namespace dsx::aio {

// There is a limit, as others in this process need files, too. Calls come one at a time.
class OpenFiles {
 public:
  // Whether one more may be opened; if not, close() is to tell of the next one that closes.
  bool has_room() {
    is_wanted_ = open_ >= most_;
    return !is_wanted_;
  }

  // One is about to be opened. Returns how many had been closed before.
  int64_t add() {
    open_++;
    return closed_;
  }

  // Whether to try again after this errno, as one that was open then has been closed or will be.
  bool may_help_to_wait(int code, int64_t closed_before) const {
    return (code == EMFILE || code == ENFILE) && (open_ > 1 || closed_ != closed_before);
  }

  // One was not opened after all, and shall be tried again. True: at once, since there is a file
  // fewer by now; else when close() tells.
  bool put_back(int64_t closed_before) {
    open_--;
    is_wanted_ = closed_ == closed_before;
    return !is_wanted_;
  }

  void close() {
    open_--;
    closed_++;
  }

  // Whether somebody has waited; tells it once. Also when a request is done that has opened none.
  bool was_wanted() { return std::exchange(is_wanted_, false); }

 private:
  static int64_t limit() {
    rlimit files{};
    if (getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur == RLIM_INFINITY) return INT64_MAX;
    return std::max(static_cast<int64_t>(files.rlim_cur) / 8, int64_t{1});  // of two descriptors
  }

  const int64_t most_ = limit();
  int64_t open_ = 0;        // or being opened
  int64_t closed_ = 0;      // how often
  bool is_wanted_ = false;  // a worker has work for when one is closed
};

}  // namespace dsx::aio
