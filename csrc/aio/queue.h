// Queue: the requests of an engine in their order, which its workers take pieces from.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "aio/request.h"
#include "aio/stats.h"

namespace dsx::aio {

// A piece that a worker has taken. finish() must follow.
struct Work {
  std::shared_ptr<Request> request;
  Piece piece;
};

class Queue {
 public:
  Queue(int64_t block_size, int64_t page_buffer);

  // Called whenever there is more for other workers than there was. Set before the first push.
  std::function<void()> on_more;

  bool push(std::shared_ptr<Request> request);  // false: closed
  void close();                                 // nothing more comes in; what is there is done

  // The next piece, or none for now. Opens the file of a request when its turn comes. Without
  // `may_copy` a piece that would need an aligned page stays where it is.
  std::optional<Work> take(bool may_copy);

  // A piece is done, all of it or not.
  void finish(const Work& work, std::optional<Failure> failure);

  // Nothing will come from take() any more.
  bool exhausted() const;

  Counters counters;

 private:
  static void start(Request& request);  // throws IoError
  bool begin(const std::shared_ptr<Request>& request);
  void complete(Request& request);  // without the mutex, as closing a file may take long

  // With the mutex held:
  std::optional<Work> cut_next(bool may_copy, bool& blocked);
  std::shared_ptr<Request> next_to_begin();

  const int64_t block_;
  const int64_t page_buffer_;
  const int64_t most_open_;  // files opened for requests: others in this process need some, too
  mutable std::mutex mutex_;
  std::deque<std::shared_ptr<Request>> waiting_;  // not open yet
  std::deque<std::shared_ptr<Request>> cutting_;  // open, with bytes that no piece was cut of
  int starting_ = 0;                              // being opened by a worker
  int64_t open_ = 0;                              // files opened for requests, or being opened
  int64_t closes_ = 0;                            // how many of those were closed
  bool wants_file_ = false;                       // a worker has work for when one is closed
  bool closed_ = false;
};

// One sentence about a request that failed, with path, offset, length, cause and free space.
Failure describe(const Request& request, int code);
Failure describe_end_of_file(const Request& request);

}  // namespace dsx::aio
