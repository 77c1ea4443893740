// An engine is a queue, the workers that empty it, and their threads.
#include "aio/engine.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "aio/queue.h"
#include "aio/regions.h"
#include "aio/worker.h"

namespace dsx::aio {
namespace {

constexpr int64_t longest_page_buffer = 1 << 20;

void check_range(const char* name, int64_t value, int64_t most) {
  if (value >= 1 && value <= most) return;
  throw std::invalid_argument("AsyncIO: " + std::string(name) + " is " + std::to_string(value) +
                              ", expected 1 to " + std::to_string(most));
}

Options checked(Options options) {
  check_range("block_size", options.block_size, max_op_bytes);
  check_range("queue_depth", options.queue_depth, 4096);
  check_range("threads", options.threads, 256);
  return options;
}

int64_t page_buffer_of(const Options& options) {
  return std::clamp(options.block_size, largest_granule, longest_page_buffer) / largest_granule *
         largest_granule;
}

// Signals are for the threads of the caller: while one of these exists, new threads block all but
// those that a thread causes itself.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP}) sigdelset(&all, fault);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

class Engine::Core {
 public:
  Core(const Options& options, std::vector<std::unique_ptr<Backend>> backends)
      : queue(options.block_size, page_buffer_of(options)), regions(plain(backends)) {
    for (auto& backend : backends) {
      workers_.push_back(std::make_unique<Worker>(std::move(backend), options.queue_depth,
                                                  page_buffer_of(options), queue, regions));
    }
    queue.on_more = [this] {
      for (auto& worker : workers_) worker->wake_if_hungry();
    };
    try {
      for (auto& worker : workers_) threads_.emplace_back([&worker] { worker->run(); });
    } catch (...) {  // no more threads: those that have begun must end first
      close();
      throw;
    }
  }

  ~Core() { close(); }

  void close() {
    std::lock_guard lock(closing_);
    if (workers_.empty()) return;
    queue.close();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
    regions.close();
    workers_.clear();  // and with them what the kernel and the page buffers held
  }

  Queue queue;
  Regions regions;

 private:
  static std::vector<Backend*> plain(const std::vector<std::unique_ptr<Backend>>& backends) {
    std::vector<Backend*> addresses;
    for (const auto& backend : backends) addresses.push_back(backend.get());
    return addresses;
  }

  std::vector<std::unique_ptr<Worker>> workers_;
  std::mutex closing_;
  std::vector<std::thread> threads_;
};

Engine::Engine(Options options, const BackendFactory& make) : process_(getpid()) {
  checked(options);
  const SignalsBlocked guard;
  std::vector<std::unique_ptr<Backend>> backends;
  for (int i = 0; i < options.threads; ++i) backends.push_back(make(options.queue_depth));
  core_ = std::make_unique<Core>(options, std::move(backends));
}

Engine::~Engine() {
  if (getpid() != process_) core_.release();  // not a leak: it is the parent's
}

std::shared_ptr<Request> Engine::submit(Transfer transfer) {
  check_process();
  if (transfer.offset < 0 || transfer.bytes < 0 || transfer.offset > INT64_MAX - transfer.bytes) {
    throw std::invalid_argument("aio: offset is " + std::to_string(transfer.offset) +
                                ", expected 0 or more, and less than 2^63 with the bytes added");
  }
  auto request = std::make_shared<Request>(std::move(transfer));
  if (!core_->queue.push(request)) {
    throw std::runtime_error("AsyncIO: engine is closed, expected an open one");
  }
  return request;
}

void Engine::close() {
  check_process();
  core_->close();
}

Stats Engine::stats() const {
  check_process();
  return core_->queue.counters.read();
}

int Engine::register_region(void* address, size_t bytes) {
  check_process();
  return core_->regions.add(address, bytes);
}

void Engine::unregister_region(int number) {
  if (getpid() == process_) core_->regions.remove(number);
}

void Engine::check_process() const {
  const int here = getpid();
  if (here == process_) return;
  throw std::runtime_error("AsyncIO: engine is used in process " + std::to_string(here) +
                           ", expected process " + std::to_string(process_) +
                           ", which made it; make another one after fork");
}

}  // namespace dsx::aio
