// Tests the backends, each alone: every op comes back once with its result, what the kernel refuses
// completes with its error, and nothing is left behind.
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <random>
#include <thread>

#include "aio/backend_factory.h"
#include "aio/backend_libaio.h"
#include "backend_ops.h"

namespace {

using namespace dsx::aio;

constexpr int64_t block = 8192;

// Writes blocks in a random order, then reads them back in another.
void test_round_trip(BackendKind kind, Folder& folder, int depth, int flags, int slot) {
  std::mt19937_64 random(uint64_t(depth) * 10 + uint64_t(flags != 0));
  const std::string path = folder.fresh();
  const Descriptor file(path, O_RDWR | O_CREAT | flags);
  if (file.get() < 0) return;
  constexpr int64_t blocks = 48;
  const Bytes wanted = sample(blocks * block, uint64_t(depth));
  const Memory source(wanted, 0), target(blocks * block);
  const auto backend = make_backend(kind, depth);
  for (const Memory* memory : {&source, &target}) {
    if (slot >= 0) backend->fix(slot, memory->address(), size_t(memory->bytes()));
    std::vector<Op> ops;
    for (int64_t i = 0; i < blocks; ++i) {
      ops.push_back(op_on(memory == &source ? Direction::write : Direction::read, file.get(),
                          i * block, memory->address() + i * block, block));
      ops.back().region = slot;
    }
    std::shuffle(ops.begin(), ops.end(), random);
    run_all(*backend, ops, depth);
    for (const Op& op : ops) {
      expect(op.result == block, "%s, depth %d: %ld of a block at %ld", name_of(kind), depth,
             long(op.result), long(op.offset));
    }
    if (slot >= 0) backend->unfix(slot);
  }
  expect(target.copy() == wanted, "%s, depth %d: what is read was written", name_of(kind), depth);
  expect(content(path) == wanted, "%s, depth %d: the file has it", name_of(kind), depth);
}

// Results are handed back as they are: short at the end of the file, and nothing behind it.
void test_results(BackendKind kind, Folder& folder) {
  const std::string path = folder.fresh();
  store(path, sample(1000, 1));
  const Descriptor file(path, O_RDWR), readonly(path, O_RDONLY), direct(path, O_RDONLY | O_DIRECT);
  const std::string written = folder.fresh();  // not that which is read: ops are in no order
  const Descriptor longer(written, O_RDWR | O_CREAT);
  const Memory memory(100'000);
  char* const at = memory.address();
  void* hole = mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const auto backend = make_backend(kind, 16);
  struct Row {
    Op op;
    int64_t result;
  };
  const Row rows[] = {
      {op_on(Direction::read, file.get(), 0, at, 1), 1},
      {op_on(Direction::read, 1'000'000, 0, at, 1), -EBADF},
      {op_on(Direction::read, file.get(), 990, at + 10, 100), 10},
      {op_on(Direction::read, -1, 0, at, 1), -EBADF},
      {op_on(Direction::write, readonly.get(), 0, at, 1), -EBADF},
      {op_on(Direction::read, file.get(), 1000, at + 200, 100), 0},
      {op_on(Direction::read, file.get(), 5'000'000'000, at + 300, 100), 0},
      {op_on(Direction::read, file.get(), 0, static_cast<char*>(hole), 100), -EFAULT},
      {op_on(Direction::write, longer.get(), 2001, at + 2001, 70'001), 70'001},
      {op_on(Direction::write, -2, 0, at, 1), -EBADF},
      {op_on(Direction::read, direct.get(), 1, at + 4096, 511), -EINVAL},
  };
  std::vector<Op> ops;
  for (const Row& row : rows) ops.push_back(row.op);
  run_all(*backend, ops, 16);  // all in one batch: the refused must not take others along
  for (size_t i = 0; i < ops.size(); ++i) {
    // Some file systems take any direct read through the page cache.
    if (ops[i].fd == direct.get() && ops[i].result == 511) continue;
    expect(ops[i].result == rows[i].result, "%s: op %zu gave %ld, expected %ld", name_of(kind), i,
           long(ops[i].result), long(rows[i].result));
  }
  ops.assign(1, rows[1].op);
  run_all(*backend, ops, 1);
  expect(ops[0].result == -EBADF, "%s: a refused op alone comes back", name_of(kind));
  munmap(hole, 4096);
  expect(std::filesystem::file_size(written) == 72'002, "the file is as long as was written");
}

void test_fix(BackendKind kind, Folder& folder) {
  const auto backend = make_backend(kind, 2);
  const Memory memory(region_slots * 4096);
  expect(!backend->fix(-1, memory.address(), 4096), "slot -1");
  expect(!backend->fix(region_slots, memory.address(), 4096), "slot %d", region_slots);
  expect(!backend->fix(0, memory.address(), size_t{2} << 30), "2 GiB are too many for one slot");
  int slots = 0;
  for (int slot = 0; slot < region_slots; ++slot) {
    slots += backend->fix(slot, memory.address() + slot * 4096, 4096);
  }
  std::printf("%s: %d slots of %d\n", name_of(kind), slots, region_slots);
  expect(kind == BackendKind::io_uring || slots == 0, "%s fixes nothing", name_of(kind));
  // Ops may name any slot, also one that was declined or is free again.
  const std::string path = folder.fresh();
  const Descriptor file(path, O_RDWR | O_CREAT);
  const auto write_each = [&](uint64_t seed) {
    const Bytes wanted = sample(memory.bytes(), seed);
    std::copy(wanted.begin(), wanted.end(), memory.address());
    std::vector<Op> ops;
    for (int slot = 0; slot < region_slots; ++slot) {
      const int64_t start = slot * 4096 + 7, end = slot * 4096 + 4096;
      ops.push_back(
          op_on(Direction::write, file.get(), start, memory.address() + start, end - start));
      ops.back().region = slot;
    }
    run_all(*backend, ops, 2);
    for (const Op& op : ops) {
      expect(op.result == op.bytes, "%s: %ld in slot %d", name_of(kind), long(op.result),
             op.region);
    }
    Bytes expected = wanted;
    for (size_t i = 0; i < expected.size(); ++i) expected[i] = i % 4096 < 7 ? '\0' : expected[i];
    expect(content(path) == expected, "%s: fixed memory is written", name_of(kind));
  };
  write_each(1);
  for (int slot = 0; slot < region_slots; slot += 2) backend->unfix(slot);
  write_each(2);
  // From another thread while the owner sleeps.
  std::thread other([&] {
    for (int slot = 0; slot < region_slots; slot += 2) {
      backend->fix(slot, memory.address() + slot * 4096, 4096);
    }
    for (int slot = 0; slot < region_slots; slot += 4) backend->unfix(slot);
    backend->wake();
  });
  std::vector<Op*> completed;
  backend->wait(completed);
  other.join();
  write_each(3);
  for (int slot = 0; slot < region_slots; ++slot) backend->unfix(slot);
}

// Two in one thread, and neither returns what the other was given.
void test_two_at_once(BackendKind kind, Folder& folder) {
  const std::string path = folder.fresh();
  const Descriptor file(path, O_RDWR | O_CREAT);
  const Bytes wanted = sample(64 * block, 5);
  const Memory source(wanted, 3);
  const std::unique_ptr<Backend> backends[] = {make_backend(kind, 32), make_backend(kind, 32)};
  std::vector<Op> ops;
  for (int64_t i = 0; i < 64; ++i) {
    ops.push_back(
        op_on(Direction::write, file.get(), i * block, source.address() + i * block, block));
  }
  for (size_t i = 0; i < 64; ++i) {
    Op* const op = &ops[i];
    backends[i % 2]->submit({&op, 1});
  }
  for (size_t which : {1, 0}) {
    std::vector<Op*> completed;
    while (completed.size() < 32) backends[which]->wait(completed);
    for (const Op* op : completed) {
      expect(size_t(op - ops.data()) % 2 == which, "%s: an op of the other", name_of(kind));
      expect(op->result == block, "%s: %ld of a block", name_of(kind), long(op->result));
    }
  }
  expect(content(path) == wanted, "%s: both wrote", name_of(kind));
}

int64_t open_files() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
}

int64_t kernel_mappings() {
  std::ifstream maps("/proc/self/maps");
  int64_t count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find("io_uring") != std::string::npos || line.find("[aio]") != std::string::npos;
  }
  return count;
}

void test_nothing_is_left(BackendKind kind) {
  const int64_t files = open_files(), mappings = kernel_mappings();
  for (int i = 0; i < 10; ++i) {
    const auto backend = make_backend(kind, 8);
    backend->wake();
    std::vector<Op*> completed;
    backend->wait(completed);
    backend->wake();  // a wake that nobody waits for
  }
  expect(open_files() == files, "%s: %ld open files, before %ld", name_of(kind), long(open_files()),
         long(files));
  expect(kernel_mappings() == mappings, "%s: mappings are left", name_of(kind));
}

// More than all of the system may have at once is refused with its errno, not later.
void test_aio_limit() {
  std::ifstream limit("/proc/sys/fs/aio-max-nr");
  int most = 0;
  if (!(limit >> most) || most <= 0 || most > 1 << 24) return;
  try {
    make_libaio_backend(most);
    expect(false, "%d events are more than there are", most + 1);
  } catch (const std::system_error& error) {
    expect(error.code().value() == EAGAIN, "io_setup: %s", error.what());
    expect(std::string(error.what()).starts_with("io_setup: "), "%s", error.what());
  }
}

}  // namespace

int main(int argc, char** argv) {
  end_when_stuck();
  Folder folder(argc, argv);
  for_each_backend([&](BackendKind kind) {
    for (int depth : {1, 5, 32}) {
      for (int flags : {0, O_DIRECT}) {
        for (int slot : {-1, 0, region_slots - 1})
          test_round_trip(kind, folder, depth, flags, slot);
      }
    }
    test_results(kind, folder);
    test_fix(kind, folder);
    test_two_at_once(kind, folder);
    test_nothing_is_left(kind);
    if (kind == BackendKind::libaio) test_aio_limit();
  });
  return finish();
}
