// Tests the engine on every backend: what is written is read back, whatever its size, place and
// address; nothing else changes; and many threads, an early end or a fork lose nothing.
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <stdexcept>
#include <thread>

#include "aio/page_buffer.h"
#include "transfers.h"

namespace {

using namespace dsx::aio;

constexpr int64_t sizes[] = {0,      1,      511,     4095,      4096,          4097,
                             12'291, 65'536, 200'001, 1'048'576, 3'145'728 + 7, 777'777};
constexpr int64_t offsets[] = {0, 1, 4096, 8703, 65'536, 1'000'003};
constexpr int64_t misalignments[] = {0, 1, 512, 4095};

// A write into a fresh file or into one that is longer or shorter, then a read of the whole.
struct RoundTrip {
  RoundTrip(Folder& folder, std::mt19937_64& random)
      : path(folder.fresh()),
        bytes(sizes[random() % std::size(sizes)]),
        offset(offsets[random() % std::size(offsets)]),
        truncate(random() % 4 == 0),
        source(sample(bytes, random()), misalignments[random() % std::size(misalignments)]) {
    if (random() % 3 != 0) {
      expected = sample(int64_t(random() % 2'000'000), random());
      store(path, expected);
    }
    const size_t end = size_t(offset + bytes);
    if (bytes > 0 && expected.size() < end) expected.resize(end);
    if (truncate && expected.size() > end) expected.resize(end);
    std::copy_n(source.address(), bytes, expected.begin() + (bytes > 0 ? offset : 0));
    target = std::make_unique<Memory>(int64_t(expected.size()), misalignments[random() % 4]);
  }

  const std::string path;
  const int64_t bytes;
  const int64_t offset;
  const bool truncate;
  const Memory source;
  Bytes expected;
  std::unique_ptr<Memory> target;
};

void test_round_trips(BackendKind kind, const Options& options, Folder& folder) {
  std::mt19937_64 random(uint64_t(options.block_size + options.queue_depth));
  Engine engine(options, factory(kind));
  std::vector<std::unique_ptr<RoundTrip>> trips;
  std::vector<std::shared_ptr<Request>> requests;
  for (int i = 0; i < 8; ++i) {
    trips.push_back(std::make_unique<RoundTrip>(folder, random));
    Transfer transfer = writing(trips.back()->path, trips.back()->source, trips.back()->offset);
    transfer.truncate = trips.back()->truncate;
    requests.push_back(engine.submit(transfer));
  }
  for (const auto& request : requests) expect_success(*request);
  requests.clear();
  for (const auto& trip : trips) {
    requests.push_back(engine.submit(reading(trip->path, *trip->target)));
  }
  for (size_t i = 0; i < trips.size(); ++i) {
    const RoundTrip& trip = *trips[i];
    expect_success(*requests[i]);
    expect(content(trip.path) == trip.expected, "%s: %ld bytes at %ld: the file differs",
           name_of(kind), long(trip.bytes), long(trip.offset));
    expect(trip.target->copy() == trip.expected, "%s: %zu bytes were read wrong", name_of(kind),
           trip.expected.size());
    std::filesystem::remove(trip.path);
  }
}

// Many requests on one file at once, side by side at any byte, in any order.
void test_neighbours(BackendKind kind, Folder& folder) {
  std::mt19937_64 random(11);
  const std::string path = folder.fresh();
  const Bytes wanted = sample(2'000'003, 4);
  Engine engine({.block_size = 65'536, .queue_depth = 8, .threads = 3}, factory(kind));
  for (Direction direction : {Direction::write, Direction::read}) {
    const auto file = File::open(path, Mode::update);
    std::vector<int64_t> cuts{0, int64_t(wanted.size())};
    for (int i = 0; i < 60; ++i) cuts.push_back(int64_t(random() % wanted.size()));
    std::ranges::sort(cuts);
    const Memory memory(wanted, 8);
    const Memory target(memory.bytes(), 1);
    std::vector<std::shared_ptr<Request>> requests;
    std::vector<size_t> order;
    for (size_t i = 0; i + 1 < cuts.size(); ++i) order.push_back(i);
    std::ranges::shuffle(order, random);
    for (size_t i : order) {
      Transfer transfer = direction == Direction::write ? writing(file, memory, cuts[i])
                                                        : reading(file, target, cuts[i]);
      transfer.address += cuts[i];
      transfer.bytes = cuts[i + 1] - cuts[i];
      requests.push_back(engine.submit(transfer));
    }
    for (const auto& request : requests) expect_success(*request);
    if (direction == Direction::read) {
      expect(target.copy() == wanted, "%s: parts were read wrong", name_of(kind));
    }
    expect(content(path) == wanted, "%s: parts of one file differ", name_of(kind));
  }
}

// One small request after the other: each must wake a worker.
void test_small_steps(BackendKind kind, Folder& folder) {
  Engine engine({.block_size = 4096, .queue_depth = 4, .threads = 3}, factory(kind));
  const auto file = File::open(folder.fresh(), Mode::update);
  const Memory source(sample(100, 9), 0), target(100);
  for (int64_t i = 0; i < 400; ++i) {
    expect_success(*engine.submit(writing(file, source, i * 100)));
    expect_success(*engine.submit(reading(file, target, i * 100)));
  }
  expect(target.copy() == source.copy(), "%s: small steps", name_of(kind));
}

// The next request comes just when the worker is about to sleep, a little sooner or later.
void test_close_calls(BackendKind kind, Folder& folder) {
  Engine engine({.block_size = 4096, .queue_depth = 1, .threads = 1}, factory(kind));
  const std::string path = folder.fresh();
  store(path, sample(100, 9));
  const auto file = File::open(path, Mode::read);
  const Memory target(100);
  std::atomic<int> moments = 0;
  for (int turn = 0; turn < 4000; ++turn) {
    const auto request = engine.submit(reading(file, target));
    for (int spins = 0; !request->done(); ++spins) {
      if (spins > 1000) std::this_thread::yield();
    }
    for (int i = turn % 100; i > 0; --i) ++moments;
  }
  expect(target.copy() == sample(100, 9), "%s: close calls", name_of(kind));
}

void test_eight_threads(BackendKind kind, Folder& folder) {
  Engine engine({.block_size = 16'384, .queue_depth = 8, .threads = 2}, factory(kind));
  std::vector<std::string> paths;
  for (int i = 0; i < 8; ++i) paths.push_back(folder.fresh());
  std::vector<std::thread> threads;
  std::vector<int> wrong(8);
  for (size_t i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      for (int64_t turn = 0; turn < 12; ++turn) {
        const Memory source(sample(30'000 + turn * 7, i * 100 + uint64_t(turn)), int64_t(i));
        const Memory target(source.bytes(), turn);
        const int number = engine.register_region(source.address(), size_t(source.bytes()));
        const int64_t offset = turn * 40'000;
        wrong[i] += !outcome(*engine.submit(writing(paths[i], source, offset))).empty();
        wrong[i] += !outcome(*engine.submit(reading(paths[i], target, offset))).empty();
        wrong[i] += target.copy() != source.copy();
        engine.unregister_region(number);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int count : wrong) expect(count == 0, "%s: eight threads, %d wrong", name_of(kind), count);
}

// Memory that the kernel knows, more of it than there are slots, and what the statistics say.
void test_regions(BackendKind kind, Folder& folder) {
  Engine engine({.block_size = 65'536, .queue_depth = 32, .threads = 1}, factory(kind));
  PageBuffer pages(1 << 20);
  const Bytes wanted = sample(1 << 20, 6);
  std::copy(wanted.begin(), wanted.end(), pages.address());
  std::vector<int> numbers;
  for (int i = 0; i < 2 * region_slots; ++i) {
    numbers.push_back(engine.register_region(pages.address(), pages.bytes()));
  }
  const std::string path = folder.fresh();
  Transfer transfer;
  transfer.direction = Direction::write;
  transfer.target = path;
  transfer.address = pages.address();
  transfer.bytes = 1 << 20;
  expect_success(*engine.submit(transfer));
  for (int number : numbers) engine.unregister_region(number);
  transfer.direction = Direction::read;
  std::fill_n(pages.address(), pages.bytes(), '\0');
  expect_success(*engine.submit(transfer));
  expect(std::equal(wanted.begin(), wanted.end(), pages.address()), "%s: regions", name_of(kind));
  const Stats stats = engine.stats();
  expect(stats.submitted == 2 && stats.completed == 2 && stats.failed == 0, "requests are counted");
  expect(stats.bytes_written == 1 << 20 && stats.bytes_read == 1 << 20, "bytes are counted");
  expect(stats.copied_bytes == 0, "aligned memory is not copied");
  std::printf("%s: %ld bytes direct, %ld fixed\n", name_of(kind), long(stats.direct_bytes),
              long(stats.fixed_bytes));
}

// More pieces that need an aligned page than a worker has pages, in a file without a name.
void test_more_than_pages(BackendKind kind, Folder& folder) {
  const int64_t mib = 1 << 20, bytes = 68 * mib + 5;
  const Bytes part = sample(mib + 1, 12);  // one more, so that no two pages are alike
  const Memory source(bytes, 1), target(bytes, 3);
  for (int64_t start = 0; start < bytes; start += mib + 1) {
    std::copy_n(part.begin(), std::min(mib + 1, bytes - start), source.address() + start);
  }
  const auto file = File::scratch(folder.path());
  Engine engine({.block_size = mib, .queue_depth = 40, .threads = 1}, factory(kind));
  expect_success(*engine.submit(writing(file, source, 77)));
  expect_success(*engine.submit(reading(file, target, 77)));
  expect(std::equal(source.address(), source.address() + bytes, target.address()),
         "%s: more than pages", name_of(kind));
  expect(file->size() == bytes + 77, "%s: scratch file of %ld", name_of(kind), long(file->size()));
}

void test_end(BackendKind kind, Folder& folder) {
  const Bytes wanted = sample(300'000, 8);
  const Memory memory(wanted, 1);
  std::vector<std::string> paths;
  std::vector<std::shared_ptr<Request>> requests;
  {
    Engine engine({.block_size = 4096, .queue_depth = 2, .threads = 1}, factory(kind));
    for (int i = 0; i < 16; ++i) {
      paths.push_back(folder.fresh());
      requests.push_back(engine.submit(writing(paths.back(), memory)));
    }
  }
  for (size_t i = 0; i < paths.size(); ++i) {
    expect(requests[i]->done(), "%s: its end waits for what is in flight", name_of(kind));
    expect_success(*requests[i]);
    expect(content(paths[i]) == wanted, "%s: all of it was written", name_of(kind));
  }
  Engine engine(usual, factory(kind));
  const auto last = engine.submit(writing(paths[0], memory));
  engine.close();
  engine.close();
  expect(last->done(), "%s: close waits for what is in flight", name_of(kind));
  expect_throws<std::runtime_error>([&] { engine.submit(writing(paths[0], memory)); }, "closed");
}

// The child of a fork has no workers: it says so, and ends at once. The parent goes on.
void test_fork(BackendKind kind, Folder& folder) {
  const Memory memory(sample(2'000'000, 3), 0);
  auto engine = std::make_unique<Engine>(
      Options{.block_size = 4096, .queue_depth = 32, .threads = 1}, factory(kind));
  const std::string path = folder.fresh();
  const auto in_flight = engine->submit(writing(path, memory));
  const pid_t child = fork();
  if (child == 0) {
    int throws = 0;
    const auto count = [&](auto&& use) {
      try {
        use();
      } catch (const std::runtime_error&) {
        ++throws;
      }
    };
    count([&] { engine->submit(writing(path, memory)); });
    count([&] { engine->stats(); });
    count([&] { engine->close(); });
    count([&] { engine->register_region(memory.address(), 4096); });
    engine.reset();
    _exit(throws);
  }
  int status = 0;
  waitpid(child, &status, 0);
  expect(WIFEXITED(status) && WEXITSTATUS(status) == 4, "%s: child ended with %d", name_of(kind),
         status);
  expect_success(*in_flight);
  expect_success(*engine->submit(writing(path, memory, 2'000'000)));
  expect(content(path).size() == 4'000'000, "%s: the parent goes on", name_of(kind));
}

}  // namespace

int main(int argc, char** argv) {
  end_when_stuck();
  Folder folder(argc, argv);
  for_each_backend([&](BackendKind kind) {
    test_fork(kind, folder);
    for (const Options& options :
         {Options{1, 4, 3}, Options{65'536, 1, 1}, Options{4096, 32, 1}, Options{65'537, 4, 3},
          Options{65'537, 32, 1}, Options{1 << 20, 8, 3}}) {
      test_round_trips(kind, options, folder);
    }
    test_neighbours(kind, folder);
    test_small_steps(kind, folder);
    test_close_calls(kind, folder);
    test_eight_threads(kind, folder);
    test_regions(kind, folder);
    test_more_than_pages(kind, folder);
    test_end(kind, folder);
  });
  return finish();
}
