// Ops for a backend, and how they are run without an engine.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "aio/backend_factory.h"
#include "expect.h"
#include "scratch.h"

class Descriptor {
 public:
  Descriptor(const std::string& path, int flags)
      : fd_(open(path.c_str(), flags | O_CLOEXEC, 0600)) {
    if (fd_ < 0) std::perror(path.c_str());
  }
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

// Runs all of them, at most `depth` at once, and expects each back exactly once.
inline void run_all(dsx::aio::Backend& backend, std::vector<dsx::aio::Op>& ops, int depth) {
  std::vector<int> returned(ops.size());
  std::vector<dsx::aio::Op*> batch, completed;
  size_t next = 0, back = 0;
  while (back < ops.size()) {
    batch.clear();
    while (next < ops.size() && next - back < size_t(depth)) batch.push_back(&ops[next++]);
    backend.submit(batch);
    completed.clear();
    backend.wait(completed);
    expect(!completed.empty(), "wait returns with an op, as nobody woke it");
    for (dsx::aio::Op* op : completed) {
      const size_t i = size_t(op - ops.data());
      expect(i < ops.size() && ++returned[i] == 1, "op %zu came back more than once", i);
    }
    back += completed.size();
  }
}

inline dsx::aio::Op op_on(dsx::aio::Direction direction, int fd, int64_t offset, char* address,
                          int64_t bytes) {
  dsx::aio::Op op;
  op.direction = direction;
  op.fd = fd;
  op.offset = offset;
  op.address = address;
  op.bytes = bytes;
  return op;
}
