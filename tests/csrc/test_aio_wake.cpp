// Tests how a backend is woken: never in vain, never for nothing, and in whatever thread.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <ctime>
#include <memory>
#include <thread>

#include "backend_ops.h"

namespace {

using namespace dsx::aio;

// Once or often, before the wait that it ends.
void test_wake_before_wait(BackendKind kind) {
  const auto backend = make_backend(kind, 4);
  std::vector<Op*> completed;
  for (int times : {1, 2, 3}) {
    for (int i = 0; i < times; ++i) backend->wake();
    backend->wait(completed);
    expect(completed.empty(), "%s: woken, nothing completed", name_of(kind));
  }
}

// One read after the other, in the turns that the owner of a backend leaves for them.
class Reads {
 public:
  Reads(Backend& backend, Folder& folder) : backend_(backend) {
    const std::string path = folder.fresh();
    store(path, sample(1000, 1));
    file_ = std::make_unique<Descriptor>(path, O_RDONLY);
    op_ = op_on(Direction::read, file_->get(), 0, memory_.address(), 1000);
  }

  void submit() {
    Op* const op = &op_;
    backend_.submit({&op, 1});
    in_flight_ = true;
  }

  void take(const std::vector<Op*>& completed) {
    if (completed.empty()) return;
    expect(in_flight_ && completed.size() == 1 && op_.result == 1000, "the read is whole");
    in_flight_ = false;
    ++done_;
  }

  bool in_flight() const { return in_flight_; }
  int64_t done() const { return done_; }

 private:
  Backend& backend_;
  const Memory memory_{1000};
  std::unique_ptr<Descriptor> file_;
  Op op_;
  bool in_flight_ = false;
  int64_t done_ = 0;
};

// Each of some threads goes on only when its wake was seen: one lost, and it stands still. With
// reads in between, as completions must not swallow a wake.
void test_wakes(BackendKind kind, Folder& folder, int wakers, bool with_reads) {
  constexpr int rounds = 500;
  const auto backend = make_backend(kind, 4);
  Reads reads(*backend, folder);
  std::array<std::atomic<int>, 3> called{}, seen{};
  std::vector<std::thread> threads;
  for (int waker = 0; waker < wakers; ++waker) {
    threads.emplace_back([&, waker] {
      for (int round = 1; round <= rounds; ++round) {
        called[waker] = round;
        backend->wake();
        while (seen[waker] != round) std::this_thread::yield();
      }
    });
  }
  const auto all_seen = [&] {
    return std::all_of(seen.begin(), seen.begin() + wakers,
                       [](const auto& count) { return count == rounds; });
  };
  std::vector<Op*> completed;
  for (int turn = 0; !all_seen() || reads.in_flight(); ++turn) {
    if (with_reads && !reads.in_flight() && !all_seen() && turn % 3 == 0) reads.submit();
    completed.clear();
    backend->wait(completed);
    reads.take(completed);
    for (int waker = 0; waker < wakers; ++waker) seen[waker] = called[waker].load();
  }
  for (std::thread& thread : threads) thread.join();
  expect(with_reads == (reads.done() > 0), "%s: %ld reads", name_of(kind), long(reads.done()));
}

// The CPU seconds of this thread.
double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

// wait() sleeps when nothing has happened, also after it was woken: it must not spin.
void test_sleep(BackendKind kind) {
  const auto backend = make_backend(kind, 1);
  double spent = 0;
  for (int round = 0; round < 2; ++round) {
    std::atomic<bool> stopped = false;
    std::thread waker([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(60));
      stopped = true;
      backend->wake();
    });
    std::vector<Op*> completed;
    int returns = 0;
    const double start = cpu_seconds();
    while (!stopped) backend->wait(completed), ++returns;
    spent = cpu_seconds() - start;
    waker.join();
    expect(returns == 1, "%s: wait returned %d times, woken once", name_of(kind), returns);
    expect(completed.empty(), "%s: nothing was submitted", name_of(kind));
  }
  expect(spent < 0.005, "%s: %.3f s of CPU in 0.06 s of sleep", name_of(kind), spent);
}

// It works in another thread than the one that made it, also when that one has ended.
void test_made_elsewhere(BackendKind kind, Folder& folder) {
  std::unique_ptr<Backend> backend;
  std::thread([&] { backend = make_backend(kind, 4); }).join();
  std::thread waker([&] { backend->wake(); });
  std::vector<Op*> completed;
  backend->wait(completed);
  expect(completed.empty(), "%s: nothing was submitted", name_of(kind));
  waker.join();
  const Descriptor file(folder.fresh(), O_RDWR | O_CREAT);
  const Memory memory(1000);
  std::vector<Op> ops{op_on(Direction::write, file.get(), 0, memory.address(), 1000)};
  run_all(*backend, ops, 4);
  expect(ops[0].result == 1000, "%s: made elsewhere", name_of(kind));
  std::thread([&] { backend.reset(); }).join();
}

}  // namespace

int main(int argc, char** argv) {
  end_when_stuck();
  Folder folder(argc, argv);
  for_each_backend([&](BackendKind kind) {
    test_wake_before_wait(kind);
    test_wakes(kind, folder, 1, false);
    test_wakes(kind, folder, 1, true);
    test_wakes(kind, folder, 3, true);
    test_sleep(kind);
    test_made_elsewhere(kind, folder);
  });
  return finish();
}
