// A request waits until a worker opens its file, is cut into pieces from its front, and is complete
// when all of them have come back. One that has failed is not cut any further.
#include "aio/queue.h"

#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <utility>

#include "aio/page_buffer.h"

namespace dsx::aio {

namespace {

int64_t most_open_files() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return INT64_MAX;
  return std::max(static_cast<int64_t>(limit.rlim_cur) / 8, int64_t{1});  // of two descriptors
}

bool is_done(const Request& request) {  // with the mutex held
  return request.in_flight == 0 && request.cut == request.transfer.bytes;
}

}  // namespace

Queue::Queue(int64_t block_size, int64_t page_buffer)
    : block_(block_size), page_buffer_(page_buffer), most_open_(most_open_files()) {}

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

std::optional<Work> Queue::take(bool may_copy) {
  for (;;) {
    std::shared_ptr<Request> request;
    {
      std::lock_guard lock(mutex_);
      bool blocked = false;
      if (auto work = cut_next(may_copy, blocked); work || blocked) return work;
      request = next_to_begin();
    }
    if (!request || !begin(request)) return std::nullopt;
  }
}

std::shared_ptr<Request> Queue::next_to_begin() {
  while (!waiting_.empty()) {
    const Request& first = *waiting_.front();
    if (first.opens && !first.cancelled()) {
      wants_file_ = open_ >= most_open_;
      if (wants_file_) return nullptr;
    }
    auto request = std::move(waiting_.front());
    waiting_.pop_front();
    if (!request->begin()) {
      counters.cancelled++;
      continue;
    }
    if (request->opens) {
      open_++;
      request->closes_before = closes_;
    }
    starting_++;
    return request;
  }
  return nullptr;
}

// False: nothing can be done until another request has closed its file.
bool Queue::begin(const std::shared_ptr<Request>& request) {
  std::optional<Failure> failure;
  try {
    start(*request);
  } catch (const IoError& error) {
    failure = describe(*request, error.code());
  } catch (const std::bad_alloc&) {
    failure = describe(*request, ENOMEM);
  }
  std::unique_lock lock(mutex_);
  starting_--;
  const bool closed_since = closes_ != request->closes_before;
  if (failure && (failure->code == EMFILE || failure->code == ENFILE) &&
      (open_ > 1 || closed_since)) {
    open_--;
    request->put_back();
    waiting_.push_front(request);
    wants_file_ = !closed_since;
    return closed_since;
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

std::optional<Work> Queue::cut_next(bool may_copy, bool& blocked) {
  if (cutting_.empty()) return std::nullopt;
  auto request = cutting_.front();
  const Piece piece = cut_piece(request->plan, request->cut, block_, page_buffer_);
  blocked = piece.copied && !may_copy;
  if (blocked) return std::nullopt;
  request->cut += piece.bytes;
  request->in_flight++;
  if (request->cut == request->transfer.bytes) cutting_.pop_front();
  return Work{std::move(request), piece};
}

void Queue::finish(const Work& work, std::optional<Failure> failure) {
  const auto& request = work.request;
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
    if (request.opens) open_--, closes_++;
    if (std::exchange(wants_file_, false)) on_more();
  }
  counters.*(request.first_failure ? &Counters::failed : &Counters::completed) += 1;
  request.complete(std::move(request.first_failure));
}

void Queue::start(Request& request) {
  Transfer& transfer = request.transfer;
  const bool writes = transfer.direction == Direction::write;
  if (request.opens) {
    request.file =
        File::open(std::get<std::string>(transfer.target), writes ? Mode::write : Mode::read);
  } else {
    request.file = std::get<std::shared_ptr<File>>(transfer.target);
    transfer.target = request.file->path();  // a request that is done keeps no file open
  }
  File& file = *request.file;
  const int64_t end = transfer.offset + transfer.bytes;
  const bool could_be_direct = transfer.bytes >= page_size();
  request.plan = make_plan(transfer.offset, reinterpret_cast<uintptr_t>(transfer.address),
                           transfer.bytes, could_be_direct ? file.alignment() : Alignment{});
  if (!writes) return;
  // What lies within the file's length and has its blocks can be written side by side; what
  // extends it, only one piece after the other. It also tells now whether the disk has the space.
  const int64_t size = transfer.truncate || request.plan.middle > 0 ? file.size() : 0;
  if (request.plan.middle > 0 && end > size) {
    const int64_t from = std::max(size, transfer.offset);
    file.allocate(from, end - from);
  }
  if (transfer.truncate && size > end) file.truncate(end);
}

namespace {

std::string path_of(const Request& request) {
  return request.file ? request.file->path() : std::get<std::string>(request.transfer.target);
}

std::string what_it_is(const Request& request) {
  const Transfer& transfer = request.transfer;
  return std::string("aio: ") + (transfer.direction == Direction::read ? "read" : "write") +
         " of " + std::to_string(transfer.bytes) + " bytes at offset " +
         std::to_string(transfer.offset) + " of " + path_of(request);
}

std::string space_left(const Request& request) {
  const int64_t bytes = request.file ? request.file->free_bytes() : free_bytes(path_of(request));
  return bytes < 0 ? "" : "; " + std::to_string(bytes) + " bytes are free there";
}

}  // namespace

Failure describe(const Request& request, int code) {
  return {code, what_it_is(request) + " failed: " + message_of(code) + space_left(request)};
}

Failure describe_end_of_file(const Request& request) {
  const Transfer& transfer = request.transfer;
  int64_t size = 0;
  try {
    size = request.file->size();
  } catch (const IoError& error) {
    return describe(request, error.code());
  }
  const int64_t there = std::clamp(size - transfer.offset, int64_t{0}, transfer.bytes);
  return {ENODATA, what_it_is(request) + " returned " + std::to_string(there) +
                       ": the file ends at " + std::to_string(size) + space_left(request)};
}

}  // namespace dsx::aio
