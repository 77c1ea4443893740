// A backend in which things go wrong as they do in real ones: at every k-th op, in the way a test
// asks for. The other ops are a real backend's.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "aio/backend.h"

enum class Fault {
  error,         // the op fails
  error_once,    // the op fails, and is spared when it comes again
  direct_error,  // the op fails if it goes around the page cache
  all_but_one,   // a byte less than asked for is moved
  half,          // so many are moved
  one_byte,      // so many are moved
  nothing,       // no byte is moved, and that is no error
};

// What is to happen, and what has happened; of all the backends of an engine.
class Faults {
 public:
  Faults(Fault fault, int error, int every) : fault_(fault), error_(error), every_(every) {}

  // Called in the worker's thread: for every op that is submitted; and when it submits none, as it
  // does between a look at an empty queue and its sleep.
  std::function<void()> before_op, before_sleep;

  // What happens to the first ops that are struck, in their order, in place of `fault`.
  std::vector<Fault> first;

  // Whether this op is one of those; then what its result is.
  bool strike(dsx::aio::Op& op, bool spared) {
    std::lock_guard lock(mutex_);
    if (before_op) before_op();
    if (++seen_ % every_ != 0 || spared) return false;
    const Fault fault = struck_.size() < first.size() ? first[struck_.size()] : fault_;
    if (fault == Fault::direct_error && (fcntl(op.fd, F_GETFL) & O_DIRECT) == 0) return false;
    op.result = result_of(op, fault);
    struck_.emplace_back(op.offset, op.offset + op.bytes);
    return true;
  }

  bool spares() const { return fault_ == Fault::error_once; }

  bool struck_within(int64_t begin, int64_t end) const {
    std::lock_guard lock(mutex_);
    return std::ranges::any_of(
        struck_, [&](const auto& range) { return range.first < end && begin < range.second; });
  }

  size_t struck() const {
    std::lock_guard lock(mutex_);
    return struck_.size();
  }

  void forget() {
    std::lock_guard lock(mutex_);
    struck_.clear();
  }

 private:
  int64_t result_of(const dsx::aio::Op& op, Fault fault) const {
    switch (fault) {
      case Fault::error:
      case Fault::error_once:
      case Fault::direct_error: return -error_;
      case Fault::all_but_one: return move(op, std::max<int64_t>(op.bytes - 1, 1));
      case Fault::half: return move(op, std::max<int64_t>(op.bytes / 2, 1));
      case Fault::one_byte: return move(op, 1);
      case Fault::nothing: return 0;
    }
    return 0;
  }

  // So many bytes and no more, through the page cache, which takes any number.
  static int64_t move(const dsx::aio::Op& op, int64_t bytes) {
    const int flags = fcntl(op.fd, F_GETFL) & O_ACCMODE;
    const int fd = open(("/proc/self/fd/" + std::to_string(op.fd)).c_str(), flags | O_CLOEXEC);
    if (fd < 0) return -errno;
    const ssize_t moved = op.direction == dsx::aio::Direction::read
                              ? pread(fd, op.address, size_t(bytes), op.offset)
                              : pwrite(fd, op.address, size_t(bytes), op.offset);
    const int64_t result = moved < 0 ? -errno : moved;
    close(fd);
    return result;
  }

  const Fault fault_;
  const int error_;
  const int every_;
  mutable std::mutex mutex_;
  int64_t seen_ = 0;
  std::vector<std::pair<int64_t, int64_t>> struck_;  // from where to where in the file
};

class FaultBackend final : public dsx::aio::Backend {
 public:
  FaultBackend(std::unique_ptr<dsx::aio::Backend> real, std::shared_ptr<Faults> faults)
      : real_(std::move(real)), faults_(std::move(faults)) {}

  void submit(std::span<dsx::aio::Op* const> ops) override {
    if (ops.empty() && faults_->before_sleep) faults_->before_sleep();
    std::vector<dsx::aio::Op*> passed;
    for (dsx::aio::Op* op : ops) {
      const bool spared = spared_.erase(op) > 0;
      if (!faults_->strike(*op, spared)) {
        passed.push_back(op);
        continue;
      }
      struck_.push_back(op);
      if (faults_->spares()) spared_.insert(op);
    }
    real_->submit(passed);
  }

  void wait(std::vector<dsx::aio::Op*>& completed) override {
    if (struck_.empty()) return real_->wait(completed);
    completed.insert(completed.end(), struck_.begin(), struck_.end());
    struck_.clear();
  }

  void wake() override { real_->wake(); }
  bool fix(int slot, void* address, size_t bytes) override {
    return real_->fix(slot, address, bytes);
  }
  void unfix(int slot) override { real_->unfix(slot); }

 private:
  std::unique_ptr<dsx::aio::Backend> real_;
  std::shared_ptr<Faults> faults_;
  std::vector<dsx::aio::Op*> struck_;
  std::set<const dsx::aio::Op*> spared_;
};
