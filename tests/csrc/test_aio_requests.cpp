// Tests how requests end and who hears of it: cancelling before a worker begins, and mailboxes. In
// other threads than the workers, so that a sanitizer sees what they share.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <future>
#include <limits>
#include <thread>

#include "aio/mailbox.h"
#include "fault_backend.h"
#include "transfers.h"

namespace {

using namespace dsx::aio;

constexpr double patience = 60;
using Numbers = std::vector<int64_t>;

std::shared_ptr<Request> request_of(const Memory& memory, const std::string& path = "nowhere") {
  return std::make_shared<Request>(writing(path, memory));
}

// Takes so many numbers out of a mailbox; sorted.
Numbers take_all(Mailbox& mailbox, size_t count) {
  Numbers all;
  while (all.size() < count) {
    const Numbers some = mailbox.take(patience);
    expect(!some.empty(), "%zu of %zu numbers have come", all.size(), count);
    if (some.empty()) break;
    all.insert(all.end(), some.begin(), some.end());
  }
  expect(mailbox.take(0).empty(), "each number comes once");
  std::ranges::sort(all);
  return all;
}

Numbers up_to(int64_t count) {
  Numbers numbers;
  for (int64_t i = 0; i < count; ++i) numbers.push_back(i);
  return numbers;
}

void test_mailbox() {
  Mailbox mailbox;
  expect(mailbox.take(0).empty() && mailbox.take(1e-3).empty(), "a new mailbox is empty");
  for (int64_t number : {7, -1, 7}) mailbox.put(number);
  expect(mailbox.take(patience) == Numbers{7, -1, 7}, "numbers keep their order");
  auto taken = std::async(std::launch::async, [&] { return take_all(mailbox, 4000); });
  std::vector<std::thread> threads;
  for (int64_t first : {0, 1000, 2000, 3000}) {
    threads.emplace_back([&mailbox, first] {
      for (int64_t i = 0; i < 1000; ++i) mailbox.put(first + i);
    });
  }
  for (std::thread& thread : threads) thread.join();
  expect(taken.get() == up_to(4000), "numbers of four threads");
}

void test_tell() {
  const Memory memory(10);
  const auto mailbox = std::make_shared<Mailbox>(), other = std::make_shared<Mailbox>();
  const auto request = request_of(memory);
  request->tell(mailbox, 1);
  request->tell(mailbox, 2);
  request->tell(other, 3);
  expect(mailbox->take(0).empty() && !request->wait_for(0), "it is not done");
  expect(request->begin(), "nobody has cancelled it");
  request->complete(std::nullopt);
  expect(mailbox->take(0) == Numbers{1, 2} && other->take(0) == Numbers{3}, "all are told");
  request->tell(other, 4);
  expect(other->take(0) == Numbers{4}, "who asks late is told at once");
  expect(mailbox.use_count() == 1 && other.use_count() == 1, "it keeps no mailbox");
}

void test_cancel() {
  const Memory memory(10);
  const auto mailbox = std::make_shared<Mailbox>();
  const auto request = request_of(memory);
  request->tell(mailbox, 5);
  expect(request->begin() && request->begun() && !request->cancel(), "what has begun goes on");
  expect(!request->done() && !request->cancelled(), "a refused cancel changes nothing");
  request->put_back();
  expect(!request->begun() && request->cancel(), "what was put back can be cancelled");
  expect(request->cancelled() && request->done(), "it is done with that");
  expect_failure(*request, ECANCELED, {"aio: "});
  expect(mailbox->take(0) == Numbers{5}, "who waits for it is told");
  expect(!request->begin() && !request->begun() && !request->cancel(), "it stays cancelled");
  expect(mailbox->take(0).empty(), "and is told once");
}

void test_cancel_closes(Folder& folder) {
  const Memory memory(10);
  auto file = File::open(folder.fresh(), Mode::update);
  const std::weak_ptr<File> open = file;
  const auto request = std::make_shared<Request>(writing(std::move(file), memory));
  expect(!open.expired() && request->cancel() && open.expired(), "it keeps no file open");
}

// Two that cancel, one that begins and two that ask to be told, all at the same moment.
void test_all_at_once() {
  const Memory memory(10);
  for (int turn = 0; turn < 300; ++turn) {
    const auto mailbox = std::make_shared<Mailbox>();
    const auto request = request_of(memory);
    std::atomic<int> ready = 0, cancels = 0, begins = 0;
    const auto at_once = [&](auto&& work) {
      return std::thread([&ready, work] {
        for (++ready; ready < 5;) std::this_thread::yield();
        work();
      });
    };
    const auto cancel = [&] { cancels += request->cancel(); };
    std::thread threads[] = {at_once(cancel), at_once([&] { request->tell(mailbox, 0); }),
                             at_once([&] {
      if (!request->begin()) return;
      ++begins;
      request->complete(std::nullopt);
    }),
                             at_once([&] { request->tell(mailbox, 1); }), at_once(cancel)};
    for (std::thread& thread : threads) thread.join();
    expect(cancels + begins == 1, "%d cancelled and %d began it", int(cancels), int(begins));
    expect(request->done() && request->cancelled() == (cancels == 1), "it ended as it was told");
    expect(take_all(*mailbox, 2) == up_to(2), "both are told");
  }
}

// The only worker is kept at its first op, so nothing that comes later begins.
void test_cancel_in_queue(BackendKind kind, Folder& folder) {
  std::promise<void> entered, leave;
  const auto faults = std::make_shared<Faults>(Fault::error, EIO, std::numeric_limits<int>::max());
  std::atomic<bool> is_first = true;
  faults->before_op = [&] {
    if (!is_first.exchange(false)) return;
    entered.set_value();
    leave.get_future().wait();
  };
  Engine engine({.block_size = 4096, .queue_depth = 1, .threads = 1}, [&](int depth) {
    return std::make_unique<FaultBackend>(make_backend(kind, depth), faults);
  });
  const Memory memory(sample(10'000, 2), 0);
  const std::string held_path = folder.fresh(), kept_path = folder.fresh();
  const auto held = engine.submit(writing(held_path, memory));
  entered.get_future().wait();
  const auto mailbox = std::make_shared<Mailbox>();
  held->tell(mailbox, 0);
  std::vector<std::string> paths;
  for (int64_t i = 1; i < 20; ++i) {
    paths.push_back(folder.fresh());
    auto gone = std::make_unique<Memory>(10'000);  // which a worker must not touch any more
    const auto request = engine.submit(writing(paths.back(), *gone));
    request->tell(mailbox, i);
    expect(request->cancel(), "%s: it waits in the queue", name_of(kind));
    gone.reset();
  }
  const auto kept = engine.submit(writing(kept_path, memory));
  kept->tell(mailbox, 20);
  expect(held->begun() && !held->cancel(), "%s: its worker is at it", name_of(kind));
  leave.set_value();
  expect(take_all(*mailbox, 21) == up_to(21), "%s: all are told", name_of(kind));
  expect_success(*held);
  expect_success(*kept);
  for (const std::string& path : {held_path, kept_path}) {
    expect(content(path) == memory.copy(), "%s: the others are written", name_of(kind));
  }
  for (const std::string& path : paths) {
    expect(!std::filesystem::exists(path), "%s: a file was made all the same", name_of(kind));
  }
  const Stats stats = engine.stats();
  expect(stats.submitted == 21 && stats.completed == 2 && stats.cancelled == 19,
         "%s: %ld cancelled, %ld completed", name_of(kind), long(stats.cancelled),
         long(stats.completed));
}

// Three threads take back what two workers begin; each request ends in one way or the other.
void test_cancel_beside_workers(BackendKind kind, Folder& folder) {
  constexpr int64_t count = 600;
  const Memory memory(sample(9000, 5), 0);
  std::vector<std::string> paths;
  std::vector<std::shared_ptr<Request>> requests;
  const auto mailbox = std::make_shared<Mailbox>();
  std::atomic<int64_t> cancels = 0;
  {
    Engine engine({.block_size = 8192, .queue_depth = 2, .threads = 2}, factory(kind));
    for (int64_t i = 0; i < count; ++i) {
      paths.push_back(folder.fresh());
      requests.push_back(engine.submit(writing(paths.back(), memory)));
      requests.back()->tell(mailbox, i);
    }
    std::vector<std::thread> threads;
    for (size_t first : {0, 1, 2}) {
      threads.emplace_back([&, first] {
        for (size_t i = count - 1 - first; i < requests.size(); i -= 3) {
          cancels += requests[i]->cancel();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    expect(take_all(*mailbox, count) == up_to(count), "%s: all are told", name_of(kind));
    engine.close();  // what was cancelled is out of its queue by then
    expect(requests[0]->done(), "%s: the first one is done", name_of(kind));
  }
  int64_t cancelled = 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    const bool written = std::filesystem::exists(paths[i]);
    cancelled += requests[i]->cancelled();
    expect(written != requests[i]->cancelled(), "%s: request %zu", name_of(kind), i);
    if (!written) continue;
    expect_success(*requests[i]);
    expect(content(paths[i]) == memory.copy(), "%s: file %zu", name_of(kind), i);
    std::filesystem::remove(paths[i]);
  }
  expect(cancelled == cancels, "%s: %ld cancelled, %ld calls", name_of(kind), long(cancelled),
         long(cancels));
}

}  // namespace

int main(int argc, char** argv) {
  end_when_stuck();
  Folder folder(argc, argv);
  test_mailbox();
  test_tell();
  test_cancel();
  test_cancel_closes(folder);
  test_all_at_once();
  for_each_backend([&](BackendKind kind) {
    test_cancel_in_queue(kind, folder);
    test_cancel_beside_workers(kind, folder);
  });
  return finish();
}
