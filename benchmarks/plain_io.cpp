// What anybody could write in an hour: direct reads or writes of equal pieces, one after the other,
// by one thread or several. The I/O engine is measured against it.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

// Moves `count` pieces of `each` bytes between the beginning of a file and memory, which is reused
// from its start when it is shorter. Returns the seconds, or minus errno.
extern "C" __attribute__((visibility("default"))) double plain_io(const char* path, int write,
                                                                  char* memory,
                                                                  int64_t memory_bytes,
                                                                  int64_t count, int64_t each,
                                                                  int threads) {
  std::vector<int> files(threads);
  for (int& file : files) {
    file = open(path, (write ? O_WRONLY : O_RDONLY) | O_DIRECT | O_CLOEXEC);
    if (file < 0) return -errno;
  }
  std::atomic<int64_t> next{0};
  std::atomic<int> failed{0};
  const auto work = [&](int file) {
    for (int64_t i; failed == 0 && (i = next++) < count;) {
      char* const address = memory + i * each % memory_bytes;
      const ssize_t moved =
          write ? pwrite(file, address, each, i * each) : pread(file, address, each, i * each);
      if (moved != each) failed = moved < 0 ? errno : EIO;
    }
  };
  const auto started = std::chrono::steady_clock::now();
  std::vector<std::thread> helpers;
  for (int i = 1; i < threads; ++i) helpers.emplace_back(work, files[i]);
  work(files[0]);
  for (std::thread& helper : helpers) helper.join();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - started;
  for (const int file : files) close(file);
  return failed != 0 ? -failed.load() : seconds.count();
}
