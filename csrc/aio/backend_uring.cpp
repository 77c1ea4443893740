// io_uring by raw system calls: one ring for one thread, and memory that the kernel knows already
// where it accepted it.
#include "aio/backend_uring.h"

#include <poll.h>
#include <sys/uio.h>

#include <array>
#include <atomic>
#include <system_error>

#include "aio/kernel_abi.h"
#include "aio/uring.h"
#include "aio/wake_event.h"

namespace dsx::aio {
namespace {

[[noreturn]] void refuse(int error, const char* call) {
  throw std::system_error(error, std::generic_category(), call);
}

class UringBackend final : public Backend {
 public:
  explicit UringBackend(int depth) : ring_(uint32_t(depth) + 1) {
    refused_.reserve(size_t(depth));
    check_ops();
    check_wake();
    // A table of empty slots, for fix(); kernels before 5.13 have none.
    std::array<iovec, region_slots> empty{};
    abi::ResourceRegister table{};
    table.count = region_slots;
    table.data = reinterpret_cast<uintptr_t>(empty.data());
    has_table_ = ring_.call_register(abi::register_buffers2, &table, sizeof table) == 0;
  }

  ~UringBackend() override {
    // Closing a ring unpins memory some time later; this does it now.
    if (has_table_) ring_.call_register(abi::register_unregister_buffers, nullptr, 0);
  }

  void submit(std::span<Op* const> ops) override {
    for (Op* op : ops) {
      abi::Sqe* const entry = ring_.next();
      if (entry == nullptr) {
        give_up(*op, EBUSY);  // more than `depth` at once
      } else {
        fill(*entry, *op);
      }
    }
    while (ring_.unsent() > 0 && send(0)) {
    }
  }

  void wait(std::vector<Op*>& completed) override {
    const size_t before = completed.size();
    collect(completed);
    while (completed.size() == before && event_.fall_asleep()) {
      watch();
      if (!send(1)) pause();
      collect(completed);
      if (event_.get_up()) return;
    }
    event_.get_up();
  }

  void wake() override { event_.wake(); }

  bool fix(int slot, void* address, size_t bytes) override {
    if (!has_table_ || slot < 0 || slot >= region_slots || bytes > size_t(max_op_bytes))
      return false;
    if (!update(slot, {address, bytes})) return false;
    fixed_.fetch_or(bit(slot));
    return true;
  }

  void unfix(int slot) override {
    if (slot < 0 || slot >= region_slots) return;
    if ((fixed_.fetch_and(~bit(slot)) & bit(slot)) != 0) update(slot, {});
  }

 private:
  static uint64_t bit(int slot) { return uint64_t{1} << slot; }

  void check_ops() {
    abi::Probe probe{};
    if (ring_.call_register(abi::register_probe, &probe, abi::probe_ops) < 0) {
      refuse(errno, "io_uring_register of a probe");
    }
    for (abi::Opcode op :
         {abi::op_read, abi::op_write, abi::op_read_fixed, abi::op_write_fixed, abi::op_poll_add}) {
      if ((probe.ops[op].flags & abi::probe_supported) == 0)
        refuse(EOPNOTSUPP, "io_uring_register");
    }
  }

  // Wakes itself once. It leaves nothing in the ring: what a thread has started ends with it, and
  // the thread that makes a backend need not be the one that uses it.
  void check_wake() {
    event_.signal();
    watch();
    while (watched_) {
      const int error = ring_.enter(1);
      if (error != 0 && error != EINTR) refuse(error, "io_uring_enter");
      ring_.reap([&](uint64_t, int32_t result) {
        watched_ = false;
        if (result < 0) refuse(-result, "io_uring_enter of a poll");
      });
    }
    event_.drain();
  }

  // Lets the ring complete once the event is readable, be it already.
  void watch() {
    if (watched_) return;
    abi::Sqe* const entry = ring_.next();
    if (entry == nullptr) return;
    entry->opcode = abi::op_poll_add;
    entry->fd = event_.fd();
    entry->op_flags = POLLIN;
    watched_ = true;
  }

  void fill(abi::Sqe& entry, Op& op) const {
    const bool reads = op.direction == Direction::read;
    const bool fixed = op.region >= 0 && (fixed_.load() & bit(op.region)) != 0;
    entry.opcode = fixed ? (reads ? abi::op_read_fixed : abi::op_write_fixed)
                         : (reads ? abi::op_read : abi::op_write);
    entry.fd = op.fd;
    entry.offset = uint64_t(op.offset);
    entry.address = reinterpret_cast<uintptr_t>(op.address);
    entry.length = uint32_t(op.bytes);
    entry.buffer_index = uint16_t(fixed ? op.region : 0);
    entry.user_data = reinterpret_cast<uintptr_t>(&op);
  }

  // False if the kernel takes nothing for now. What it will never take completes with the error.
  bool send(uint32_t completions) {
    const int error = ring_.enter(completions);
    if (error == 0 || error == EINTR) return true;
    if (error == EAGAIN || error == EBUSY) return false;
    ring_.withdraw([&](uint64_t data) {
      if (data == 0) {
        watched_ = false;
      } else {
        give_up(*reinterpret_cast<Op*>(uintptr_t(data)), error);
      }
    });
    return false;
  }

  void give_up(Op& op, int error) {
    op.result = -error;
    refused_.push_back(&op);
  }

  // Sleeps for a moment at most, when nothing would say that the kernel takes more again.
  void pause() {
    pollfd descriptors[] = {{ring_.fd(), POLLIN, 0}, {event_.fd(), POLLIN, 0}};
    poll(descriptors, 2, 1);
  }

  void collect(std::vector<Op*>& completed) {
    completed.insert(completed.end(), refused_.begin(), refused_.end());
    refused_.clear();
    ring_.reap([&](uint64_t data, int32_t result) {
      if (data == 0) {
        watched_ = false;
        event_.drain();
        return;
      }
      Op* const op = reinterpret_cast<Op*>(uintptr_t(data));
      op->result = result;
      completed.push_back(op);
    });
  }

  bool update(int slot, iovec memory) {
    abi::ResourceUpdate change{};
    change.offset = uint32_t(slot);
    change.data = reinterpret_cast<uintptr_t>(&memory);
    change.count = 1;
    return ring_.call_register(abi::register_buffers_update, &change, sizeof change) == 1;
  }

  WakeEvent event_;
  Ring ring_;                 // goes first, as it watches the event
  std::vector<Op*> refused_;  // completed with an error before the kernel had them
  bool watched_ = false;      // the ring watches the event
  bool has_table_ = false;
  std::atomic<uint64_t> fixed_{0};  // a bit for each slot
};

}  // namespace

std::unique_ptr<Backend> make_uring_backend(int depth) {
  return std::make_unique<UringBackend>(depth);
}

}  // namespace dsx::aio
