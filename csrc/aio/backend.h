// What moves pieces between memory and a file without waiting: io_uring, Linux aio, or a pool of
// threads. A backend belongs to one thread; only wake, fix and unfix may be called from others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace dsx::aio {

enum class Direction : uint8_t { read, write };

// One piece on its way. It stays where it is until wait() has handed it back.
struct Op {
  Direction direction = Direction::read;
  int fd = -1;
  int64_t offset = 0;  // in the file
  char* address = nullptr;
  int64_t bytes = 0;   // at most max_op_bytes
  int region = -1;     // the slot given to fix() that [address, address + bytes) lies in, or -1
  int64_t result = 0;  // set on completion: the bytes that were moved, or -errno
};

inline constexpr int64_t max_op_bytes = int64_t{1} << 30;  // the kernel moves at most 2 GiB at once
inline constexpr int region_slots = 64;

class Backend {
 public:
  virtual ~Backend() = default;  // nothing is in flight any more

  // Starts these; at most `depth` are ever in flight. Each comes back from wait() exactly once,
  // also one that the kernel refuses. Never throws.
  virtual void submit(std::span<Op* const> ops) = 0;

  // Sleeps until an op has completed or wake() was called, then appends what has completed.
  virtual void wait(std::vector<Op*>& completed) = 0;

  // Ends the wait() that runs now, or the next one.
  virtual void wake() = 0;

  // Tells the kernel once about memory of many ops, in a slot below region_slots. False: it cannot,
  // and ops there go without. The memory must stay until unfix.
  virtual bool fix(int /*slot*/, void* /*address*/, size_t /*bytes*/) { return false; }
  virtual void unfix(int /*slot*/) {}
};

// Moves a piece now, in this thread, and returns its result.
int64_t move_now(const Op& op);

}  // namespace dsx::aio
