// The two queues that io_uring shares with this process: mapped, filled in, sent, and taken from.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <system_error>

#include "aio/kernel_abi.h"

namespace dsx::aio {

inline uint32_t acquire(uint32_t& counter) {
  return std::atomic_ref(counter).load(std::memory_order_acquire);
}

inline void release(uint32_t& counter, uint32_t value) {
  std::atomic_ref(counter).store(value, std::memory_order_release);
}

class RingFd {
 public:
  RingFd(uint32_t entries, abi::UringParams& params) {
    // From the best flags down to those of the oldest kernel that has the ops.
    for (uint32_t flags :
         {abi::setup_coop_taskrun | abi::setup_submit_all, abi::setup_submit_all, uint32_t{0}}) {
      params = {};
      params.flags = flags;
      fd_ = int(syscall(abi::sys_io_uring_setup, entries, &params));
      if (fd_ >= 0) return;
      if (errno != EINVAL) break;
    }
    throw std::system_error(errno, std::generic_category(), "io_uring_setup");
  }
  ~RingFd() { close(fd_); }
  RingFd(const RingFd&) = delete;
  RingFd& operator=(const RingFd&) = delete;

  int get() const { return fd_; }

 private:
  int fd_ = -1;
};

class Mapping {
 public:
  Mapping(int fd, uint64_t offset, size_t bytes)
      : address_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd,
                      off_t(offset))),
        bytes_(bytes) {
    if (address_ == MAP_FAILED)
      throw std::system_error(errno, std::generic_category(), "mmap of io_uring");
  }
  ~Mapping() { munmap(address_, bytes_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  template <class T>
  T* at(uint64_t offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(address_) + offset);
  }

 private:
  void* address_;
  size_t bytes_;
};

// The two queues shared with the kernel. Entries are numbered without end; a mask finds their slot.
class Ring {
 public:
  explicit Ring(uint32_t entries)
      : fd_(entries, params_),
        rings_(fd_.get(), abi::offset_rings, rings_bytes(params_)),
        sqes_(fd_.get(), abi::offset_sqes, params_.sq_entries * sizeof(abi::Sqe)),
        sq_tail_(*rings_.at<uint32_t>(params_.sq.tail)) {
    uint32_t* const slots = rings_.at<uint32_t>(params_.sq.array);
    for (uint32_t i = 0; i < params_.sq_entries; ++i) slots[i] = i;
  }

  int fd() const { return fd_.get(); }

  // The next entry to fill in, sent by the next enter(); null if all are taken.
  abi::Sqe* next() {
    if (unsent() == params_.sq_entries) return nullptr;
    abi::Sqe& entry = sqe(sq_tail_++);
    entry = {};
    return &entry;
  }

  uint32_t unsent() const { return sq_tail_ - sq_head(); }

  // Sends all entries and waits for `completions`; less of both if the kernel says so. 0 or errno.
  int enter(uint32_t completions) {
    release(*rings_.at<uint32_t>(params_.sq.tail), sq_tail_);
    const uint32_t flags = completions > 0 ? abi::enter_getevents : 0;
    const long sent =
        syscall(abi::sys_io_uring_enter, fd(), unsent(), completions, flags, nullptr, size_t{0});
    return sent < 0 ? errno : 0;
  }

  // Takes back the entries that were not sent.
  template <class Function>
  void withdraw(Function&& take) {
    for (uint32_t i = sq_head(); i != sq_tail_; ++i) take(sqe(i).user_data);
    sq_tail_ = sq_head();
    release(*rings_.at<uint32_t>(params_.sq.tail), sq_tail_);
  }

  // Takes all completions that are there.
  template <class Function>
  void reap(Function&& take) {
    uint32_t& head = *rings_.at<uint32_t>(params_.cq.head);
    const uint32_t tail = acquire(*rings_.at<uint32_t>(params_.cq.tail));
    const uint32_t mask = params_.cq_entries - 1;
    for (uint32_t i = head; i != tail; ++i) {
      const abi::Cqe entry = rings_.at<abi::Cqe>(params_.cq.cqes)[i & mask];
      release(head, i + 1);
      take(entry.user_data, entry.result);
    }
  }

  long call_register(uint32_t opcode, void* argument, uint32_t count) {
    return syscall(abi::sys_io_uring_register, fd(), opcode, argument, count);
  }

 private:
  static size_t rings_bytes(const abi::UringParams& params) {
    constexpr uint32_t needed = abi::feature_single_mmap | abi::feature_nodrop;
    if ((params.features & needed) != needed)
      throw std::system_error(EOPNOTSUPP, std::generic_category(), "io_uring_setup");
    return std::max(params.sq.array + params.sq_entries * sizeof(uint32_t),
                    params.cq.cqes + params.cq_entries * sizeof(abi::Cqe));
  }

  uint32_t sq_head() const { return acquire(*rings_.at<uint32_t>(params_.sq.head)); }
  abi::Sqe& sqe(uint32_t i) const { return sqes_.at<abi::Sqe>(0)[i & (params_.sq_entries - 1)]; }

  abi::UringParams params_;
  RingFd fd_;
  Mapping rings_;
  Mapping sqes_;
  uint32_t sq_tail_;  // ahead of the shared one by what the kernel has not been told
};

}  // namespace dsx::aio
