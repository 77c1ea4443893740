// The loop: take pieces while there is room, sleep, look at what came back. What came back short
// goes out again; only a piece of which every byte has moved is done.
#include "aio/worker.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "aio/error_text.h"

namespace dsx::aio {
namespace {

constexpr int most_attempts = 1000;            // of a piece that keeps being interrupted
constexpr int64_t most_page_bytes = 64 << 20;  // aligned pages of one worker

bool is_aligned(const Op& op, const Alignment& alignment) {
  const auto address = reinterpret_cast<uintptr_t>(op.address);
  return op.offset % alignment.granule == 0 && op.bytes % alignment.granule == 0 &&
         address % static_cast<uintptr_t>(alignment.memory) == 0;
}

}  // namespace

Worker::Worker(std::unique_ptr<Backend> backend, int depth, int64_t page_buffer, Queue& queue,
               Regions& regions)
    : backend_(std::move(backend)),
      queue_(queue),
      regions_(regions),
      depth_(depth),
      page_buffer_(page_buffer),
      slots_(2 * static_cast<size_t>(depth)) {
  for (Slot& slot : slots_) free_.push_back(&slot);
}

void Worker::run() {
  for (;;) {
    prepare_all();
    hungry_ = !free_.empty();
    if (hungry_) prepare_all();  // what was pushed before that could be seen
    if (free_.size() == slots_.size() && queue_.exhausted()) break;
    completed_.clear();
    backend_->wait(completed_);
    for (Op* op : completed_) {
      in_flight_--;
      advance(static_cast<Slot&>(*op));
    }
    launch();
    for (Slot* slot : landed_) land(*slot);
    landed_.clear();
  }
  queue_.on_more();  // the others may sleep, and nobody else is left to wake them
}

void Worker::wake_if_hungry() {
  if (hungry_.exchange(false)) backend_->wake();
}

void Worker::prepare_all() {
  while (!free_.empty()) {
    auto io = queue_.take(may_copy());
    if (!io) break;
    Slot& slot = *free_.back();
    free_.pop_back();
    prepare(slot, std::move(*io));
    prepared_.push_back(&slot);
  }
  launch();
}

void Worker::launch() {
  leaving_.clear();
  while (in_flight_ < depth_ && !prepared_.empty()) {
    leaving_.push_back(prepared_.front());
    prepared_.pop_front();
    in_flight_++;
  }
  backend_->submit(leaving_);
}

void Worker::prepare(Slot& slot, PendingIo io) {
  slot.io = std::move(io);
  slot.attempts = 0;
  const Transfer& transfer = slot.io.request->transfer;
  const Piece& piece = slot.io.piece;
  File& file = *slot.io.request->file;
  char* source = transfer.address + piece.start;
  Op& op = slot;
  op = {.direction = transfer.direction,
        .fd = piece.direct ? file.direct() : -1,
        .offset = transfer.offset + piece.start,
        .address = source,
        .bytes = piece.bytes};
  if (piece.copied && op.fd >= 0) slot.page = take_page();
  if (op.fd < 0 || (piece.copied && slot.page == nullptr)) {
    op.fd = file.buffered();  // so it was planned, or was refused since then, or there is no memory
  } else if (piece.copied) {
    op.address = slot.page;
    op.region = pages_are_fixed_ ? page_buffer_slot : -1;
    if (op.direction == Direction::write) {
      launch();  // the device need not wait for the copy
      std::memcpy(slot.page, source, static_cast<size_t>(piece.bytes));
    }
  } else if (piece.direct) {
    op.region = regions_.slot_of(source, piece.bytes);
  }
}

void Worker::submit(Slot& slot) {
  Op* op = &slot;
  in_flight_++;
  backend_->submit({&op, 1});
}

void Worker::advance(Slot& slot) {
  Op& op = slot;
  Request& request = *slot.io.request;
  File& file = *request.file;
  const bool was_direct = op.fd != file.buffered();
  Counters& counters = queue_.counters;
  if (op.result == -EINTR || op.result == -EAGAIN) {
    if (++slot.attempts == most_attempts) return give_back(slot, describe(request, EAGAIN));
    counters.resubmitted++;
    return submit(slot);
  }
  if (was_direct && (op.result == -EINVAL || op.result == -EOPNOTSUPP)) {
    // Kernels differ in what they take directly, whatever they say; through the cache all do.
    file.refuse_direct();
    counters.direct_refused++;
    op.fd = file.buffered();
    return submit(slot);
  }
  if (op.result < 0) return give_back(slot, describe(request, static_cast<int>(-op.result)));
  if (op.result == 0) {
    return give_back(slot, op.direction == Direction::read ? describe_end_of_file(request)
                                                           : describe(request, EIO));
  }
  (op.direction == Direction::read ? counters.bytes_read : counters.bytes_written) += op.result;
  if (was_direct) counters.direct_bytes += op.result;
  if (op.region >= 0) counters.fixed_bytes += op.result;
  op.offset += op.result;
  op.address += op.result;
  op.bytes -= op.result;
  slot.attempts = 0;
  if (op.bytes > 0) {
    counters.resubmitted++;
    if (was_direct && !is_aligned(op, request.plan.alignment)) op.fd = file.buffered();
    return submit(slot);
  }
  if (slot.page != nullptr) return landed_.push_back(&slot);
  give_back(slot, std::nullopt);
}

void Worker::land(Slot& slot) {
  const Piece& piece = slot.io.piece;
  const Transfer& transfer = slot.io.request->transfer;
  queue_.counters.copied_bytes += piece.bytes;
  if (transfer.direction == Direction::read) {
    std::memcpy(transfer.address + piece.start, slot.page, static_cast<size_t>(piece.bytes));
  }
  give_back(slot, std::nullopt);
}

void Worker::give_back(Slot& slot, std::optional<Failure> failure) {
  if (slot.page != nullptr) free_pages_.push_back(std::exchange(slot.page, nullptr));
  queue_.finish(slot.io, std::move(failure));
  slot.io = {};
  free_.push_back(&slot);
}

bool Worker::may_copy() { return !pages_ || !free_pages_.empty(); }

char* Worker::take_page() {
  if (!pages_) {  // only transfers with unaligned addresses need any
    const int64_t most = std::max(most_page_bytes / page_buffer_, int64_t{1});
    const int64_t count = std::min(static_cast<int64_t>(slots_.size()), most);
    try {
      pages_ = std::make_unique<PageBuffer>(static_cast<size_t>(count * page_buffer_));
    } catch (const std::bad_alloc&) {
      return nullptr;
    }
    for (int64_t i = 0; i < count; ++i) free_pages_.push_back(pages_->address() + i * page_buffer_);
    pages_are_fixed_ = backend_->fix(page_buffer_slot, pages_->address(), pages_->bytes());
  }
  char* page = free_pages_.back();
  free_pages_.pop_back();
  return page;
}

}  // namespace dsx::aio
