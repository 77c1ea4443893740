// A request waits until a worker opens its file, is cut into pieces from its front, and is complete
// when all of them have come back. One that has failed is not cut any further.
#include "aio/queue.h"

#include <utility>

#include "aio/opening.h"

namespace dsx::aio {

namespace {

bool is_done(const Request& request) {  // with the mutex held
  return request.in_flight == 0 && request.cut == request.transfer.bytes;
}

}  // namespace

bool Queue::push(std::shared_ptr<Request> request) {
  std::lock_guard lock(mutex_);
  if (closed_) return false;
  waiting_.push_back(std::move(request));
  counters.submitted++;
  on_more();
  return true;
}

void Queue::close() {
  std::lock_guard lock(mutex_);
  closed_ = true;
  on_more();
}

bool Queue::exhausted() const {
  std::lock_guard lock(mutex_);
  return closed_ && waiting_.empty() && cutting_.empty() && starting_ == 0;
}

std::optional<PendingIo> Queue::take(bool may_copy) {
  for (;;) {
    std::shared_ptr<Request> request;
    {
      std::lock_guard lock(mutex_);
      if (!cutting_.empty()) return cut(may_copy);
      request = next_to_begin();
    }
    if (!request || !begin(request)) return std::nullopt;
  }
}

std::optional<PendingIo> Queue::cut(bool may_copy) {
  auto request = cutting_.front();
  const Piece piece = cut_piece(request->plan, request->cut, block_, page_buffer_);
  if (piece.copied && !may_copy) return std::nullopt;
  request->cut += piece.bytes;
  request->in_flight++;
  if (request->cut == request->transfer.bytes) cutting_.pop_front();
  return PendingIo{std::move(request), piece};
}

std::shared_ptr<Request> Queue::next_to_begin() {
  while (!waiting_.empty()) {
    const Request& first = *waiting_.front();
    if (first.opens && !first.cancelled() && !files_.has_room()) return nullptr;
    auto request = std::move(waiting_.front());
    waiting_.pop_front();
    if (!request->begin()) {
      counters.cancelled++;
      continue;
    }
    if (request->opens) request->closed_before = files_.add();
    starting_++;
    return request;
  }
  return nullptr;
}

// False: nothing can be done until another request has closed its file.
bool Queue::begin(const std::shared_ptr<Request>& request) {
  std::optional<Failure> failure = make_ready(*request);
  std::unique_lock lock(mutex_);
  starting_--;
  if (failure && request->opens && files_.may_help_to_wait(failure->code, request->closed_before)) {
    request->put_back();
    waiting_.push_front(request);
    return files_.put_back(request->closed_before);
  }
  if (failure || request->transfer.bytes == 0) {
    request->first_failure = std::move(failure);
    request->cut = request->transfer.bytes;
    lock.unlock();
    complete(*request);
  } else {
    cutting_.push_back(request);
    on_more();
  }
  return true;
}

void Queue::finish(const PendingIo& io, std::optional<Failure> failure) {
  const auto& request = io.request;
  {
    std::lock_guard lock(mutex_);
    request->in_flight--;
    if (failure && !request->first_failure) request->first_failure = std::move(failure);
    if (request->first_failure && request->cut < request->transfer.bytes) {
      request->cut = request->transfer.bytes;
      std::erase(cutting_, request);
    }
    if (!is_done(*request)) return;
  }
  complete(*request);
}

void Queue::complete(Request& request) {
  request.file.reset();  // closes it, unless somebody holds it open
  {
    std::lock_guard lock(mutex_);
    if (request.opens) files_.close();
    if (files_.was_wanted()) on_more();
  }
  counters.*(request.first_failure ? &Counters::failed : &Counters::completed) += 1;
  request.complete(std::move(request.first_failure));
}

}  // namespace dsx::aio
