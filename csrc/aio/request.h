// Request: one transfer between memory and a file, from submission to its last byte.
#pragma once

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "aio/backend.h"
#include "aio/error.h"
#include "aio/file.h"
#include "aio/mailbox.h"
#include "aio/plan.h"

namespace dsx::aio {

struct Transfer {
  Direction direction = Direction::read;
  std::variant<std::string, std::shared_ptr<File>> target;  // a path, or an open file
  char* address = nullptr;  // stays where it is until the request is done
  int64_t bytes = 0;
  int64_t offset = 0;     // in the file
  bool truncate = false;  // a write: the file ends where it ends
};

class Request {
 public:
  explicit Request(Transfer asked)
      : transfer(std::move(asked)), opens(std::holds_alternative<std::string>(transfer.target)) {}

  bool done() const {
    std::lock_guard lock(mutex_);
    return done_;
  }

  // Waits; false when it is not done after that time.
  bool wait_for(double seconds) const {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return done_; });
  }

  std::optional<Failure> failure() const {  // of a request that is done; none: every byte has moved
    std::lock_guard lock(mutex_);
    return failure_;
  }

  // Puts the number there once it is done, be it now.
  void tell(std::shared_ptr<Mailbox> mailbox, int64_t number) {
    std::lock_guard lock(mutex_);
    if (done_) return mailbox->put(number);
    told_.emplace_back(std::move(mailbox), number);
  }

  // Takes it back as long as no worker has begun it; then it is done, and its memory is free.
  bool cancel() {
    Stage stage = Stage::waiting;
    if (!stage_.compare_exchange_strong(stage, Stage::cancelled)) return false;
    transfer.target = std::string();  // keeps no file open
    complete(Failure{ECANCELED, "aio: " + message_of(ECANCELED)});
    return true;
  }

  bool begun() const { return stage_ == Stage::begun; }
  bool cancelled() const { return stage_ == Stage::cancelled; }

  // The rest is the engine's.

  bool begin() {  // false: it was cancelled
    Stage stage = Stage::waiting;
    return stage_.compare_exchange_strong(stage, Stage::begun);
  }
  void put_back() { stage_ = Stage::waiting; }  // nothing has been done for it

  void complete(std::optional<Failure> failure) {
    std::lock_guard lock(mutex_);
    failure_ = std::move(failure);
    done_ = true;
    changed_.notify_all();
    for (const auto& [mailbox, number] : std::exchange(told_, {})) mailbox->put(number);
  }

  Transfer transfer;           // its target becomes a path when `file` is set
  const bool opens;            // the file is opened for this request, and closed with it
  std::shared_ptr<File> file;  // while the request is under way; set by the worker that starts it
  Plan plan;                   // likewise

  // Guarded by the queue's mutex:
  int64_t cut = 0;            // bytes that pieces have been cut of
  int64_t in_flight = 0;      // pieces
  int64_t closed_before = 0;  // how many files had been closed when this one was to be opened
  std::optional<Failure> first_failure;

 private:
  enum class Stage : uint8_t { waiting, begun, cancelled };

  std::atomic<Stage> stage_ = Stage::waiting;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool done_ = false;
  std::optional<Failure> failure_;
  std::vector<std::pair<std::shared_ptr<Mailbox>, int64_t>> told_;  // when it is done
};

}  // namespace dsx::aio
