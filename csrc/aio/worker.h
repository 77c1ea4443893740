// Worker: one thread of an engine, with a backend whose queue it keeps full. It prepares as much
// again as is in flight: when a piece comes back the next one leaves at once, and copies to and
// from aligned pages are made while the device is busy.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "aio/backend.h"
#include "aio/page_buffer.h"
#include "aio/queue.h"
#include "aio/regions.h"

namespace dsx::aio {

class Worker {
 public:
  Worker(std::unique_ptr<Backend> backend, int depth, int64_t page_buffer, Queue& queue,
         Regions& regions);

  void run();  // until the queue is exhausted
  void wake_if_hungry();
  Backend& backend() { return *backend_; }

 private:
  struct Slot : Op {
    PendingIo io;
    char* page = nullptr;  // that the piece goes through, when it is copied
    int attempts = 0;      // without a byte moved
  };

  void prepare_all();
  void prepare(Slot& slot, PendingIo io);
  void launch();
  void submit(Slot& slot);
  void advance(Slot& slot);
  void land(Slot& slot);
  void give_back(Slot& slot, std::optional<Failure> failure);
  bool may_copy();
  char* take_page();

  std::unique_ptr<Backend> backend_;
  Queue& queue_;
  Regions& regions_;
  const int depth_;
  const int64_t page_buffer_;
  std::vector<Slot> slots_;  // each is in one of these lists, or in flight
  std::vector<Slot*> free_;
  std::deque<Slot*> prepared_;
  std::vector<Slot*> landed_;  // every byte is in the aligned page
  int in_flight_ = 0;
  std::vector<Op*> leaving_, completed_;  // kept for their memory
  std::unique_ptr<PageBuffer> pages_;
  std::vector<char*> free_pages_;
  bool pages_are_fixed_ = false;
  std::atomic<bool> hungry_ = false;  // has free slots and sleeps, or is about to
};

}  // namespace dsx::aio
