// Engine: reads and writes between memory and files while its caller does something else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "aio/backend.h"
#include "aio/request.h"
#include "aio/stats.h"

namespace dsx::aio {

struct Options {       // the defaults are those of Python's AsyncIO, not declared a second time
  int64_t block_size;  // bytes of one piece
  int queue_depth;     // pieces in flight, of each thread
  int threads;
};

using BackendFactory = std::function<std::unique_ptr<Backend>(int depth)>;

class Engine {
 public:
  // Throws std::invalid_argument, or std::system_error when a backend cannot be made.
  Engine(Options options, const BackendFactory& make);

  // Waits for what is in flight. In a child process after fork it does nothing: the threads are the
  // parent's.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // From any thread. Throws std::invalid_argument, and std::runtime_error when the engine is closed
  // or another process made it.
  std::shared_ptr<Request> submit(Transfer transfer);

  void close();  // waits for what is in flight; nothing can be submitted any more
  Stats stats() const;

  // Tells the kernel once about memory that many transfers will use; a number for the second.
  int register_region(void* address, size_t bytes);
  void unregister_region(int number);

 private:
  class Core;
  void check_process() const;

  std::unique_ptr<Core> core_;
  int process_;
};

}  // namespace dsx::aio
