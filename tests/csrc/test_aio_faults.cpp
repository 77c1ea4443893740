// Tests the engine on backends in which ops fail, are interrupted or come back short: what can be
// healed loses no byte, and an error fails its own request and no other.
#include <cstring>
#include <mutex>

#include "fault_backend.h"
#include "transfers.h"

namespace {

using namespace dsx::aio;

struct Case {
  BackendKind kind;
  Fault fault;
  int error;
  int every;
  int threads;
  Direction direction;

  bool comes_short() const {
    return fault == Fault::all_but_one || fault == Fault::half || fault == Fault::one_byte;
  }
  bool heals() const { return fault != Fault::error && fault != Fault::nothing; }
  std::string name() const {
    return std::string(name_of(kind)) + (direction == Direction::read ? " read" : " write") +
           ", fault " + std::to_string(int(fault)) + " (" + std::to_string(error) + ") at every " +
           std::to_string(every) + ", threads " + std::to_string(threads);
  }
};

// Parts of one file, apart from each other and not, aligned and not.
struct Part {
  int64_t offset;
  int64_t bytes;
  int64_t misaligned;
};

constexpr Part parts[] = {{0, 1, 0},
                          {1, 70'001, 0},
                          {81'920, 65'536, 0},
                          {147'456, 4096, 1},
                          {151'552, 200'000, 5},
                          {360'448, 131'072, 512},
                          {500'000, 30'000, 0},
                          {530'000, 3, 2},
                          {540'672, 262'144, 0},
                          {810'000, 12'345, 64}};
constexpr int64_t file_bytes = 850'000;

BackendFactory faulty(BackendKind kind, std::shared_ptr<Faults> faults) {
  return
      [=](int depth) { return std::make_unique<FaultBackend>(make_backend(kind, depth), faults); };
}

// All parts of the file at once, in one direction. The file goes on to the next trial as this one
// leaves it.
class Trial {
 public:
  Trial(const Case& what, const std::string& path, uint64_t seed)
      : case_(what), path_(path), before_(content(path)), news_(sample(file_bytes, seed)) {}

  void run(Engine& engine, Faults& faults) {
    faults.forget();
    const Stats stats = engine.stats();
    const auto file = File::open(path_, Mode::update);
    for (const Part& part : parts) requests_.push_back(engine.submit(transfer_of(part, file)));
    for (const auto& request : requests_) outcome(*request);
    expect(faults.struck() > 0 || case_.fault == Fault::direct_error, "%s: nothing went wrong",
           name());
    check_parts(faults);
    expect(!case_.comes_short() || engine.stats().direct_refused == 0,
           "%s: the unaligned rest of a piece was tried around the page cache", name());
    expect(engine.stats().failed - stats.failed == failed_, "%s: failures are counted", name());
    expect(engine.stats().completed - stats.completed == int64_t(std::size(parts)) - failed_,
           "%s: completions are counted", name());
  }

 private:
  const char* name() { return (name_ = case_.name()).c_str(); }

  Transfer transfer_of(const Part& part, const std::shared_ptr<File>& file) {
    if (case_.direction == Direction::read) {
      memories_.push_back(std::make_unique<Memory>(part.bytes, part.misaligned));
      return reading(file, *memories_.back(), part.offset);
    }
    const auto from = news_.begin() + part.offset;
    memories_.push_back(std::make_unique<Memory>(Bytes(from, from + part.bytes), part.misaligned));
    return writing(file, *memories_.back(), part.offset);
  }

  void check_parts(const Faults& faults) {
    Bytes expected = before_;
    const Bytes after = content(path_);
    expect(after.size() == before_.size(), "%s: %zu bytes long", name(), after.size());
    for (size_t i = 0; i < std::size(parts); ++i) {
      const Part& part = parts[i];
      const auto in_expected = expected.begin() + part.offset;
      if (!case_.heals() && faults.struck_within(part.offset, part.offset + part.bytes)) {
        check_failure(part, *requests_[i]);
        std::copy_n(after.begin() + part.offset, part.bytes, in_expected);  // anything may be there
        ++failed_;
        continue;
      }
      expect_success(*requests_[i]);
      if (case_.direction == Direction::write) {
        std::copy_n(news_.begin() + part.offset, part.bytes, in_expected);
      } else {
        expect(std::equal(in_expected, in_expected + part.bytes, memories_[i]->address()),
               "%s: part %zu was read wrong", name(), i);
      }
    }
    expect(after == expected, "%s: the file is not what was written", name());
  }

  void check_failure(const Part& part, const Request& request) {
    expect_failure(request, case_.error,
                   {case_.direction == Direction::read ? "read of " : "write of ",
                    std::to_string(part.bytes) + " bytes at offset " + std::to_string(part.offset),
                    path_, std::strerror(case_.error), "bytes are free"});
  }

  const Case case_;
  const std::string path_;
  const Bytes before_, news_;
  std::string name_;
  std::vector<std::unique_ptr<Memory>> memories_;
  std::vector<std::shared_ptr<Request>> requests_;
  int64_t failed_ = 0;
};

void test_kind(BackendKind kind, Folder& folder) {
  const std::string path = folder.fresh();
  store(path, sample(file_bytes, 0));
  struct Row {
    Fault fault;
    int error;
  };
  const Row rows[] = {
      {Fault::error, EIO},           {Fault::error, ENOSPC},
      {Fault::error_once, EINTR},    {Fault::error_once, EAGAIN},
      {Fault::direct_error, EINVAL}, {Fault::direct_error, EOPNOTSUPP},
      {Fault::all_but_one, 0},       {Fault::half, 0},
      {Fault::one_byte, 0},          {Fault::nothing, EIO},
  };
  uint64_t seed = 0;
  for (const Row& row : rows) {
    for (int every : {1, 2, 3, 7}) {
      if (row.fault == Fault::one_byte && every == 1) continue;  // would take one op a byte
      const int threads = int(++seed % 2) + 1;
      const auto faults = std::make_shared<Faults>(row.fault, row.error, every);
      Engine engine({.block_size = 65'536, .queue_depth = 4, .threads = threads},
                    faulty(kind, faults));
      for (Direction direction : {Direction::write, Direction::read}) {
        // Nothing read is the end of the file; a write that moves nothing must not go on for ever.
        if (row.fault == Fault::nothing && direction == Direction::read) continue;
        Trial({kind, row.fault, row.error, every, threads, direction}, path, seed)
            .run(engine, *faults);
      }
    }
  }
}

// Direct I/O turns out to be refused while other pieces are under way on it, which come back short,
// at an odd place.
void test_refused_under_way(BackendKind kind, Folder& folder) {
  for (Direction direction : {Direction::write, Direction::read}) {
    for (int64_t misaligned : {0, 1}) {
      const std::string path = folder.fresh();
      const Bytes bytes = sample(8 * 65'536, 5);
      store(path, direction == Direction::read ? bytes : Bytes(bytes.size()));
      const auto faults = std::make_shared<Faults>(Fault::direct_error, EINVAL, 1);
      faults->first = {Fault::direct_error, Fault::all_but_one, Fault::half, Fault::one_byte};
      Engine engine({.block_size = 65'536, .queue_depth = 4, .threads = 1}, faulty(kind, faults));
      const auto file = File::open(path, Mode::update);
      const Memory from(bytes, misaligned), into(8 * 65'536, misaligned);
      expect_success(*engine.submit(direction == Direction::write ? writing(file, from)
                                                                  : reading(file, into)));
      expect((direction == Direction::write ? content(path) : into.copy()) == bytes,
             "%s: every byte is right although direct I/O is refused", name_of(kind));
      const bool refused = engine.stats().direct_refused > 0;
      expect(refused || faults->struck() == 0, "%s: direct I/O was not refused", name_of(kind));
    }
  }
}

// What is interrupted again and again ends as an error, not as a hang.
void test_no_end(BackendKind kind, Folder& folder) {
  for (int error : {EINTR, EAGAIN}) {
    const auto faults = std::make_shared<Faults>(Fault::error, error, 1);
    Engine engine(usual, faulty(kind, faults));
    const Memory memory(10'000);
    const auto request = engine.submit(writing(folder.fresh(), memory));
    expect_failure(*request, EAGAIN, {"write of 10000 bytes", std::strerror(EAGAIN)});
  }
}

// What has failed is not gone on with.
void test_stops(BackendKind kind, Folder& folder) {
  const auto faults = std::make_shared<Faults>(Fault::error, EIO, 1);
  Engine engine({.block_size = 65'536, .queue_depth = 1, .threads = 1}, faulty(kind, faults));
  const Memory memory(100 * 65'536);
  expect_failure(*engine.submit(writing(folder.fresh(), memory)), EIO, {std::strerror(EIO)});
  expect(faults->struck() < 10, "%s: %zu of 100 pieces were tried", name_of(kind),
         faults->struck());
}

// Several workers are in the middle of several requests when some of these fail.
void test_beside(BackendKind kind, Folder& folder) {
  const std::string path = folder.fresh();
  const Bytes bytes = sample(200'000, 3);
  store(path, bytes);
  Engine engine({.block_size = 4096, .queue_depth = 1, .threads = 4}, factory(kind));
  for (int round = 0; round < 40; ++round) {
    std::vector<std::unique_ptr<Memory>> memories;
    std::vector<std::shared_ptr<Request>> requests;
    for (int i = 0; i < 6; ++i) {
      memories.push_back(std::make_unique<Memory>(200'000));
      requests.push_back(engine.submit(reading(path, *memories.back(), i % 2 == 0 ? 195'000 : 0)));
    }
    for (size_t i = 0; i < 6; i += 2) expect_failure(*requests[i], ENODATA, {"returned 5000"});
    for (size_t i = 1; i < 6; i += 2) {
      expect_success(*requests[i]);
      expect(memories[i]->copy() == bytes, "%s: beside others that fail", name_of(kind));
    }
  }
}

// A request that comes when the worker has looked for one, and does not sleep yet, is not missed.
// What wakes it has no bytes, so no completion makes it look again.
void test_last_moment(BackendKind kind, Folder& folder) {
  const std::string path = folder.fresh();
  store(path, {});
  const Memory memory(100), none(0);
  const auto faults = std::make_shared<Faults>(Fault::error, EIO, 1'000'000);
  std::mutex mutex;
  Engine* open_engine = nullptr;
  std::vector<std::shared_ptr<Request>> requests;
  faults->before_sleep = [&, calls = 0]() mutable {
    std::lock_guard lock(mutex);
    if (open_engine == nullptr || ++calls % 2 == 0) return;
    requests.push_back(open_engine->submit(writing(path, memory)));
  };
  Engine engine(usual, faulty(kind, faults));
  for (int round = 0; round < 50; ++round) {
    std::unique_lock lock(mutex);
    open_engine = &engine;
    requests.assign(1, engine.submit(reading(path, none)));
    for (size_t i = 0; i < requests.size() && i < 5; ++i) {
      const auto request = requests[i];
      lock.unlock();
      expect_success(*request);
      lock.lock();
    }
    open_engine = nullptr;
  }
}

// The file is cut off while its reading is under way.
void test_truncated_under_way(BackendKind kind, Folder& folder) {
  const std::string path = folder.fresh(), other = folder.fresh();
  const Bytes bytes = sample(1 << 20, 3);
  store(path, bytes);
  store(other, bytes);
  const auto faults = std::make_shared<Faults>(Fault::error, EIO, 1'000'000);
  faults->before_op = [&, ops = 0]() mutable {
    if (++ops == 5) std::filesystem::resize_file(path, 100'001);
  };
  Engine engine({.block_size = 65'536, .queue_depth = 2, .threads = 1}, faulty(kind, faults));
  const Memory memory(1 << 20), second(1 << 20);
  const auto cut = engine.submit(reading(path, memory));
  const auto whole = engine.submit(reading(other, second));
  expect_failure(*cut, ENODATA,
                 {"read of 1048576 bytes at offset 0 of " + path, "the file ends at 100001",
                  "returned 100001"});
  expect_success(*whole);
  expect(second.copy() == bytes, "%s: the other file is whole", name_of(kind));
}

}  // namespace

int main(int argc, char** argv) {
  end_when_stuck();
  Folder folder(argc, argv);
  for_each_backend([&](BackendKind kind) {
    test_kind(kind, folder);
    test_refused_under_way(kind, folder);
    test_no_end(kind, folder);
    test_stops(kind, folder);
    test_beside(kind, folder);
    test_last_moment(kind, folder);
    test_truncated_under_way(kind, folder);
  });
  return finish();
}
