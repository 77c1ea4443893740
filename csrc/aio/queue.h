// Queue: the requests of an engine in their order, which its workers take pieces from.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "aio/open_files.h"
#include "aio/request.h"
#include "aio/stats.h"

namespace dsx::aio {

// A piece that a worker has taken. finish() must follow.
struct PendingIo {
  std::shared_ptr<Request> request;
  Piece piece;
};

class Queue {
 public:
  Queue(int64_t block_size, int64_t page_buffer) : block_(block_size), page_buffer_(page_buffer) {}

  // Called whenever there is more for other workers than there was. Set before the first push.
  std::function<void()> on_more;

  bool push(std::shared_ptr<Request> request);  // false: closed
  void close();                                 // nothing more comes in; what is there is done

  // The next piece, or none for now. Opens the file of a request when its turn comes. Without
  // `may_copy` a piece that would need an aligned page stays where it is.
  std::optional<PendingIo> take(bool may_copy);

  // A piece is done, all of it or not.
  void finish(const PendingIo& io, std::optional<Failure> failure);

  // Nothing will come from take() any more.
  bool exhausted() const;

  Counters counters;

 private:
  bool begin(const std::shared_ptr<Request>& request);
  void complete(Request& request);  // without the mutex, as closing a file may take long

  // With the mutex held:
  std::optional<PendingIo> cut(bool may_copy);
  std::shared_ptr<Request> next_to_begin();

  const int64_t block_;
  const int64_t page_buffer_;
  mutable std::mutex mutex_;
  std::deque<std::shared_ptr<Request>> waiting_;  // not open yet
  std::deque<std::shared_ptr<Request>> cutting_;  // open, with bytes that no piece was cut of
  int starting_ = 0;                              // being opened by a worker
  OpenFiles files_;
  bool closed_ = false;
};

}  // namespace dsx::aio
