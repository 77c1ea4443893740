// Tests what the engine says of files that are too short, missing, forbidden or too large, and that
// every other request completes.
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <csignal>
#include <cstring>
#include <stdexcept>

#include "transfers.h"

namespace {

using namespace dsx::aio;

// A limit of this process, until the end of the block.
class Limited {
 public:
  Limited(int resource, rlim_t most) : resource_(resource) {
    getrlimit(__rlimit_resource_t(resource_), &before_);
    const rlimit now{most, before_.rlim_max};
    setrlimit(__rlimit_resource_t(resource_), &now);
  }
  ~Limited() { setrlimit(__rlimit_resource_t(resource_), &before_); }
  Limited(const Limited&) = delete;
  Limited& operator=(const Limited&) = delete;

 private:
  int resource_;
  rlimit before_{};
};

// The engine of a test, and a request before and after what fails, which must not.
class Bystanders {
 public:
  Bystanders(BackendKind kind, Folder& folder)
      : engine({.block_size = 16'384, .queue_depth = 4, .threads = 2}, factory(kind)),
        file_(File::open(folder.fresh(), Mode::update)),
        memory_(sample(100'000, 1), 1) {
    first_ = engine.submit(writing(file_, memory_, 0));
  }

  void check() {
    const auto second = engine.submit(writing(file_, memory_, 100'000));
    expect_success(*first_);
    expect_success(*second);
    const Memory target(200'000);
    expect_success(*engine.submit(reading(file_, target)));
    const Bytes bytes = target.copy();
    expect(std::equal(bytes.begin(), bytes.begin() + 100'000, memory_.address()) &&
               std::equal(bytes.begin() + 100'000, bytes.end(), memory_.address()),
           "the others moved every byte");
  }

  Engine engine;

 private:
  std::shared_ptr<File> file_;
  const Memory memory_;
  std::shared_ptr<Request> first_;
};

void test_too_short(BackendKind kind, Folder& folder) {
  Bystanders others(kind, folder);
  Engine& engine = others.engine;
  const std::string path = folder.fresh(), empty = folder.fresh();
  const Bytes bytes = sample(50'001, 2);
  store(path, bytes);
  store(empty, {});
  const Memory exact(50'001), long_one(90'000), small(10);
  const auto past = engine.submit(reading(path, long_one));
  const auto whole = engine.submit(reading(path, exact));
  const auto at_end = engine.submit(reading(path, small, 50'001));
  const auto around = engine.submit(reading(path, small, 49'995));
  const auto beyond = engine.submit(reading(path, small, 1'000'000));
  const auto of_none = engine.submit(reading(empty, small));
  const std::string ends = "the file ends at 50001";
  expect_failure(*past, ENODATA,
                 {"aio: read of 90000 bytes at offset 0 of " + path, ends, "returned 50001"});
  expect_failure(*at_end, ENODATA, {"read of 10 bytes at offset 50001", ends, "returned 0"});
  expect_failure(*around, ENODATA, {"read of 10 bytes at offset 49995", ends, "returned 6"});
  expect_failure(*beyond, ENODATA, {"offset 1000000", ends, "returned 0", "bytes are free"});
  expect_failure(*of_none, ENODATA, {empty, "the file ends at 0", "returned 0"});
  expect_success(*whole);
  expect(exact.copy() == bytes, "%s: exactly the file is read", name_of(kind));
  const Memory none(0);
  expect_success(*engine.submit(reading(empty, none)));
  expect_success(*engine.submit(reading(path, none, 1'000'000)));
  others.check();
}

void test_not_to_be_had(BackendKind kind, Folder& folder) {
  Bystanders others(kind, folder);
  Engine& engine = others.engine;
  const Memory memory(10'000);
  const std::string missing = folder.fresh(), inside = missing + "/below/file";
  expect_failure(*engine.submit(reading(missing, memory)), ENOENT,
                 {"aio: read of 10000 bytes at offset 0 of " + missing, std::strerror(ENOENT),
                  "bytes are free"});
  expect_failure(*engine.submit(writing(inside, memory, 7)), ENOENT,
                 {"aio: write of 10000 bytes at offset 7 of " + inside, std::strerror(ENOENT),
                  "bytes are free"});
  expect(!std::filesystem::exists(missing), "reading makes no file");
  const std::string path = folder.fresh();
  store(path, sample(10'000, 3));
  expect_failure(*engine.submit(writing(path + "/x", memory)), ENOTDIR, {path + "/x"});
  const auto readonly = File::open(path, Mode::read);
  expect_failure(*engine.submit(writing(readonly, memory)), EBADF,
                 {"write of 10000 bytes", path, std::strerror(EBADF)});
  expect_success(*engine.submit(reading(readonly, memory)));
  expect(content(path) == sample(10'000, 3), "%s: a read-only file stays", name_of(kind));
  const std::string directory = folder.fresh();
  std::filesystem::create_directory(directory);
  expect_failure(*engine.submit(writing(directory, memory)), EISDIR, {directory});
  expect_failure(*engine.submit(reading(directory, memory)), EISDIR, {directory});
  others.check();
}

// Runs it in a child process, which it may change as it likes; whether it failed nothing there.
template <class Test>
bool succeeds_in_child(Test&& test) {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    const long before = failures;
    test();
    std::fflush(stdout);
    _exit(failures == before ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// As somebody who may read a file, and no more. Root may do anything, so a child gives that up.
void test_forbidden(BackendKind kind, Folder& folder) {
  const std::string path = folder.fresh();
  store(path, sample(10'000, 3));
  std::filesystem::permissions(path, std::filesystem::perms(0444));
  const bool succeeds = succeeds_in_child([&] {
    if (geteuid() == 0) expect(setresuid(65'534, 65'534, 65'534) == 0, "root becomes nobody");
    Engine engine(usual, factory(kind));
    const Memory memory(10'000);
    expect_failure(*engine.submit(writing(path, memory)), EACCES,
                   {path, std::strerror(EACCES), "bytes are free"});
    expect_success(*engine.submit(reading(path, memory)));
  });
  expect(succeeds, "%s: a read-only file", name_of(kind));
  expect(content(path) == sample(10'000, 3), "%s: a read-only file stays", name_of(kind));
}

// A device that is always full, and a file system of 1 MiB, in a child that may mount one.
void test_no_space(BackendKind kind, Folder& folder) {
  const Memory small(sample(10'000, 4), 0), large(sample(2 << 20, 5), 0), odd(large.copy(), 1);
  if (kind != BackendKind::libaio) {  // which cannot write to this device at all
    Bystanders others(kind, folder);
    expect_failure(*others.engine.submit(writing("/dev/full", small)), ENOSPC,
                   {"aio: write of 10000 bytes at offset 0 of /dev/full", std::strerror(ENOSPC)});
    others.check();
  }
  const std::string directory = folder.fresh();
  std::filesystem::create_directory(directory);
  const bool succeeds = succeeds_in_child([&] {
    if (unshare(CLONE_NEWNS) != 0 ||
        mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        mount("none", directory.c_str(), "tmpfs", 0, "size=1m") != 0) {
      std::printf("skipped: a full tmpfs, errno %d\n", errno);
      return;
    }
    Engine engine({.block_size = 65'536, .queue_depth = 4, .threads = 1}, factory(kind));
    const std::string path = directory + "/file", free = "bytes are free there";
    expect_success(*engine.submit(writing(path, small)));
    for (const Memory* memory : {&large, &odd}) {
      expect_failure(*engine.submit(writing(directory + "/large", *memory)), ENOSPC,
                     {"write of 2097152 bytes at offset 0 of " + directory + "/large",
                      std::strerror(ENOSPC), free});
      std::filesystem::remove(directory + "/large");
    }
    expect_success(*engine.submit(writing(path, small, 10'000)));
    expect(content(path).size() == 20'000, "%s: the others complete", name_of(kind));
  });
  expect(succeeds, "%s: a full file system", name_of(kind));
}

void test_too_large(BackendKind kind, Folder& folder) {
  Bystanders others(kind, folder);
  std::signal(SIGXFSZ, SIG_IGN);
  const Memory large(sample(1'000'000, 4), 0), small(sample(3'000, 5), 0);
  const std::string path = folder.fresh(), second = folder.fresh();
  {
    const Limited limited(RLIMIT_FSIZE, 500'000);
    const auto over = others.engine.submit(writing(path, large));
    const auto over_buffered = others.engine.submit(writing(second, small, 498'000));
    expect_failure(
        *over, EFBIG,
        {"write of 1000000 bytes at offset 0 of " + path, std::strerror(EFBIG), "bytes are free"});
    expect_failure(*over_buffered, EFBIG, {"write of 3000 bytes at offset 498000", second});
    others.check();
  }
  expect_success(*others.engine.submit(writing(path, large)));
  expect(content(path) == large.copy(), "%s: the same file, without the limit", name_of(kind));
}

int lowest_free_descriptor() {
  const int fd = dup(0);
  close(fd);
  return fd;
}

void test_no_descriptors(BackendKind kind, Folder& folder) {
  Bystanders others(kind, folder);
  const Memory memory(sample(10'000, 6), 0);
  std::vector<std::string> paths;
  for (int i = 0; i < 4; ++i) paths.push_back(folder.fresh());
  {
    const Limited limited(RLIMIT_NOFILE, rlim_t(lowest_free_descriptor()));
    for (const std::string& path : paths) {
      expect_failure(*others.engine.submit(writing(path, memory)), EMFILE,
                     {"write of 10000 bytes at offset 0 of " + path, std::strerror(EMFILE)});
    }
  }
  {
    // One is enough: then the file is not read or written around the page cache.
    const Limited limited(RLIMIT_NOFILE, rlim_t(lowest_free_descriptor()) + 1);
    expect_success(*others.engine.submit(writing(paths[0], memory)));
  }
  expect_success(*others.engine.submit(writing(paths[1], memory)));
  expect(content(paths[0]) == memory.copy(), "%s: one descriptor is enough", name_of(kind));
  others.check();
}

// A thousand requests by path, with room for few open files at a time.
void test_many_files(BackendKind kind, Folder& folder) {
  Engine engine({.block_size = 4096, .queue_depth = 4, .threads = 2}, factory(kind));
  const Memory memory(sample(5'000, 7), 0);
  std::vector<std::string> paths;
  std::vector<std::shared_ptr<Request>> requests;
  const int free_one = lowest_free_descriptor();
  const Limited limited(RLIMIT_NOFILE, rlim_t(free_one) + 40);
  for (int i = 0; i < 300; ++i) {
    paths.push_back(folder.fresh());
    requests.push_back(engine.submit(writing(paths.back(), memory)));
  }
  for (const auto& request : requests) expect_success(*request);
  expect(lowest_free_descriptor() == free_one, "%s: files are closed again", name_of(kind));
  for (const std::string& path : paths) {
    expect(content(path) == memory.copy(), "%s: one of many files", name_of(kind));
    std::filesystem::remove(path);
  }
}

void test_arguments(BackendKind kind, Folder& folder) {
  const BackendFactory make = factory(kind);
  using Invalid = std::invalid_argument;
  expect_throws<Invalid>([&] { Engine({.block_size = 0, .queue_depth = 32, .threads = 1}, make); },
                         "block_size is 0");
  expect_throws<Invalid>([&] { Engine({.block_size = 1, .queue_depth = 0, .threads = 1}, make); },
                         "queue_depth is 0");
  expect_throws<Invalid>([&] {
    Engine({.block_size = 1, .queue_depth = 1 << 20, .threads = 1}, make);
  }, "queue_depth is 1048576");
  expect_throws<Invalid>([&] { Engine({.block_size = 1, .queue_depth = 1, .threads = -1}, make); },
                         "threads is -1");
  const auto none = [](int) -> std::unique_ptr<Backend> {
    throw std::system_error(EPERM, std::generic_category(), "io_uring_setup");
  };
  expect_throws<std::system_error>([&] { Engine(usual, none); }, "io_uring_setup");
  Engine engine(usual, make);
  const Memory memory(10'000);
  const std::string path = folder.fresh();
  expect_throws<Invalid>([&] { engine.submit(writing(path, memory, -1)); }, "offset is -1");
  const int64_t far = INT64_MAX - 5'000;
  expect_throws<Invalid>([&] { engine.submit(writing(path, memory, far)); }, "offset is");
  // The last bytes that an offset can name are more than any file system has.
  const auto last = engine.submit(writing(path, memory, INT64_MAX - 10'000));
  expect_failure(*last, EFBIG, {std::to_string(INT64_MAX - 10'000)});
  expect_failure(*engine.submit(reading(path, memory, INT64_MAX - 10'000)), ENODATA, {"ends at 0"});
}

}  // namespace

int main(int argc, char** argv) {
  end_when_stuck();
  Folder folder(argc, argv);
  for_each_backend([&](BackendKind kind) {
    test_forbidden(kind, folder);
    test_no_space(kind, folder);
    test_too_short(kind, folder);
    test_not_to_be_had(kind, folder);
    test_too_large(kind, folder);
    test_no_descriptors(kind, folder);
    test_many_files(kind, folder);
    test_arguments(kind, folder);
  });
  return finish();
}
