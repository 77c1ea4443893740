// Linux aio by raw system calls. What the kernel will not take now waits here for a completion.
#include "aio/backend_libaio.h"

#include <linux/aio_abi.h>
#include <poll.h>

#include <algorithm>
#include <array>
#include <system_error>

#include "aio/kernel_abi.h"
#include "aio/wake_event.h"

namespace dsx::aio {
namespace {

class Context {
 public:
  explicit Context(unsigned events) {
    if (syscall(SYS_io_setup, events, &context_) < 0) {
      throw std::system_error(errno, std::generic_category(), "io_setup");
    }
  }
  ~Context() { syscall(SYS_io_destroy, context_); }  // ends the poll that may still be there
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  // How many of them it took, at least one, or -errno of the first.
  long submit(iocb** blocks, size_t count) {
    const long taken = syscall(SYS_io_submit, context_, long(count), blocks);
    return taken < 0 ? -errno : taken;
  }

  // How many have completed; none if a signal or the timeout came first.
  long completed(std::vector<io_event>& events, timespec* timeout) {
    const long count =
        syscall(SYS_io_getevents, context_, 1L, long(events.size()), events.data(), timeout);
    return std::max(count, 0L);
  }

 private:
  aio_context_t context_ = 0;
};

iocb block_of(const Op& op) {
  iocb block{};
  block.aio_data = reinterpret_cast<uintptr_t>(&op);
  block.aio_lio_opcode = op.direction == Direction::read ? IOCB_CMD_PREAD : IOCB_CMD_PWRITE;
  block.aio_fildes = uint32_t(op.fd);
  block.aio_buf = reinterpret_cast<uintptr_t>(op.address);
  block.aio_nbytes = uint64_t(op.bytes);
  block.aio_offset = op.offset;
  return block;
}

class LibaioBackend final : public Backend {
 public:
  explicit LibaioBackend(int depth) : events_(size_t(depth) + 1), context_(unsigned(depth) + 1) {
    waiting_.reserve(size_t(depth));
    refused_.reserve(size_t(depth));
    const int error = watch();
    if (error != 0) throw std::system_error(error, std::generic_category(), "io_submit of a poll");
  }

  void submit(std::span<Op* const> ops) override {
    waiting_.insert(waiting_.end(), ops.begin(), ops.end());
    send();
  }

  void wait(std::vector<Op*>& completed) override {
    const size_t before = completed.size();
    hand_back_refused(completed);
    while (completed.size() == before && event_.fall_asleep()) {
      if (!watched_) watch();
      sleep(completed);
      send();
      hand_back_refused(completed);
      if (event_.get_up()) return;
    }
    event_.get_up();
  }

  void wake() override { event_.wake(); }

 private:
  // Lets the kernel complete one more block once the event is readable; 0 or errno.
  int watch() {
    iocb block{};
    block.aio_lio_opcode = abi::iocb_cmd_poll;
    block.aio_fildes = uint32_t(event_.fd());
    block.aio_buf = POLLIN;
    iocb* const blocks[] = {&block};
    const long taken = context_.submit(const_cast<iocb**>(blocks), 1);
    watched_ = taken == 1;
    return watched_ ? 0 : int(-taken);
  }

  // Gives the kernel what waits here, as much as it takes.
  void send() {
    std::array<iocb, 64> blocks;
    std::array<iocb*, 64> addresses;
    size_t sent = 0;
    while (sent < waiting_.size()) {
      const size_t count = std::min(blocks.size(), waiting_.size() - sent);
      for (size_t i = 0; i < count; ++i) {
        blocks[i] = block_of(*waiting_[sent + i]);
        addresses[i] = &blocks[i];
      }
      const long taken = context_.submit(addresses.data(), count);
      if (taken == -EAGAIN || taken == 0) break;
      if (taken > 0) {
        sent += size_t(taken);
        in_flight_ += taken;
      } else if (taken != -EINTR) {
        // Some devices know only plain calls, which also name the cause where there is another one.
        Op* const op = waiting_[sent++];
        op->result = taken == -EINVAL ? move_now(*op) : taken;
        refused_.push_back(op);
      }
    }
    waiting_.erase(waiting_.begin(), waiting_.begin() + ptrdiff_t(sent));
  }

  // Until something completes; shortly, if nothing would say when the kernel takes more again.
  void sleep(std::vector<Op*>& completed) {
    timespec moment{0, 1'000'000};
    const bool unannounced = !watched_ || (in_flight_ == 0 && !waiting_.empty());
    const long count = context_.completed(events_, unannounced ? &moment : nullptr);
    for (const io_event& event : std::span(events_).first(size_t(count))) {
      if (event.data == 0) {
        watched_ = false;
        event_.drain();
        continue;
      }
      Op* const op = reinterpret_cast<Op*>(uintptr_t(event.data));
      op->result = event.res;
      completed.push_back(op);
      --in_flight_;
    }
  }

  void hand_back_refused(std::vector<Op*>& completed) {
    completed.insert(completed.end(), refused_.begin(), refused_.end());
    refused_.clear();
  }

  std::vector<Op*> waiting_;  // submitted, not yet taken by the kernel
  std::vector<Op*> refused_;  // not taken by io_submit, and completed
  std::vector<io_event> events_;
  long in_flight_ = 0;
  bool watched_ = false;
  WakeEvent event_;
  Context context_;  // goes first, as it watches the event
};

}  // namespace

std::unique_ptr<Backend> make_libaio_backend(int depth) {
  return std::make_unique<LibaioBackend>(depth);
}

}  // namespace dsx::aio
