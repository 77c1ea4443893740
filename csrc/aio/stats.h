// What an engine has done so far.
#pragma once

#include <atomic>
#include <cstdint>

namespace dsx::aio {

struct Stats {
  int64_t submitted = 0;  // requests
  int64_t completed = 0;  // requests of which every byte has moved
  int64_t failed = 0;     // requests
  int64_t cancelled = 0;  // requests that were taken back before they began
  int64_t bytes_read = 0;
  int64_t bytes_written = 0;
  int64_t direct_bytes = 0;    // of those: not through the page cache
  int64_t fixed_bytes = 0;     // of those: in memory that the kernel had been told about
  int64_t copied_bytes = 0;    // of those: through aligned pages, as the address was not
  int64_t resubmitted = 0;     // pieces that came back short or interrupted
  int64_t direct_refused = 0;  // pieces that the kernel took only through the page cache
};

struct Counters {
  std::atomic<int64_t> submitted{0}, completed{0}, failed{0}, cancelled{0};
  std::atomic<int64_t> bytes_read{0}, bytes_written{0};
  std::atomic<int64_t> direct_bytes{0}, fixed_bytes{0}, copied_bytes{0};
  std::atomic<int64_t> resubmitted{0}, direct_refused{0};

  Stats read() const {
    return {submitted,    completed,   failed,       cancelled,   bytes_read,    bytes_written,
            direct_bytes, fixed_bytes, copied_bytes, resubmitted, direct_refused};
  }
};

}  // namespace dsx::aio
