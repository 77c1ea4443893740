// Opening files, and what can be asked of an open one.
#include "aio/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <utility>

#include "aio/error.h"
#include "aio/kernel_abi.h"
#include "aio/page_buffer.h"

namespace dsx::aio {
namespace {

constexpr int unknown_alignment = 4096;  // what every device takes that does not say

template <class Call>
int retried(Call&& call) {
  int result;
  do {
    result = call();
  } while (result == -1 && errno == EINTR);
  return result;
}

[[noreturn]] void fail(const std::string& doing, const std::string& path, int code = errno) {
  throw IoError(code, "aio: " + doing + " " + path + " failed: " + message_of(code));
}

int flags_of(Mode mode) {
  switch (mode) {
    case Mode::read: return O_RDONLY;
    case Mode::write: return O_WRONLY | O_CREAT;
    case Mode::update: return O_RDWR | O_CREAT;
  }
  return O_RDONLY;
}

// -1 of a file system that has no blocks, and says 0 of them: /proc, memfd_create, tmpfs without
// size.
int64_t free_bytes_of(const struct statvfs& system) {
  if (system.f_blocks == 0) return -1;
  return static_cast<int64_t>(system.f_bavail) * static_cast<int64_t>(system.f_frsize);
}

bool is_stream(mode_t mode) { return S_ISFIFO(mode) || S_ISSOCK(mode); }

// Of a pipe that nobody reads, and of a socket, the kernel says that there is no such device.
void refuse_stream(const std::string& path, int code) {
  struct stat kind{};
  if (code == ENXIO && stat(path.c_str(), &kind) == 0 && is_stream(kind.st_mode)) {
    fail("opening", path, ESPIPE);
  }
}

bool is_power_of_two(int64_t value) { return value > 0 && (value & (value - 1)) == 0; }

}  // namespace

File::File(std::string path, int buffered, int flags)
    : path_(std::move(path)), buffered_(buffered), flags_(flags) {}

File::~File() { abandon(); }

void File::abandon() {
  for (int* fd : {&direct_, &buffered_}) {
    if (*fd >= 0) ::close(std::exchange(*fd, -1));
  }
}

std::shared_ptr<File> File::open(const std::string& path, Mode mode) {
  const int flags = flags_of(mode) | O_CLOEXEC;
  // A pipe would wait for somebody at its other end, and has no offsets anyway.
  const int fd = retried([&] { return ::open(path.c_str(), flags | O_NONBLOCK, 0666); });
  if (fd == -1) {
    const int code = errno;
    refuse_stream(path, code);
    fail("opening", path, code);
  }
  auto file = std::shared_ptr<File>(new File(path, fd, flags));
  struct stat kind{};
  if (fstat(fd, &kind) == -1) fail("opening", path);
  if (S_ISDIR(kind.st_mode)) fail("opening", path, EISDIR);
  if (is_stream(kind.st_mode)) fail("opening", path, ESPIPE);
  if (fcntl(fd, F_SETFL, flags & ~O_CREAT) == -1) fail("opening", path);
  return file;
}

std::shared_ptr<File> File::scratch(const std::string& folder) {
  const int flags = O_RDWR | O_CLOEXEC;
  int fd = retried([&] { return ::open(folder.c_str(), flags | O_TMPFILE, 0600); });
  if (fd == -1 && (errno == EOPNOTSUPP || errno == EISDIR)) {  // not with this file system
    std::string name = folder + "/.scratch-XXXXXX";
    fd = mkostemp(name.data(), O_CLOEXEC);
    if (fd != -1) ::unlink(name.c_str());
  }
  if (fd == -1) fail("making a scratch file in", folder);
  return std::shared_ptr<File>(new File(folder, fd, flags));
}

int File::direct() {
  if (refused_) return -1;
  std::call_once(once_, [this] { open_direct(); });
  return refused_ ? -1 : direct_;
}

Alignment File::alignment() { return direct() >= 0 ? alignment_ : Alignment{}; }

void File::refuse_direct() { refused_ = true; }

void File::open_direct() {
  struct stat kind{};
  if (fstat(buffered_, &kind) == -1 || !(S_ISREG(kind.st_mode) || S_ISBLK(kind.st_mode))) return;
  KernelStatx status{};
  int64_t granule = unknown_alignment, memory = unknown_alignment;
  if (syscall(SYS_statx, buffered_, "", AT_EMPTY_PATH, statx_dio_align, &status) == 0 &&
      (status.stx_mask & statx_dio_align) != 0) {
    granule = status.stx_dio_offset_align;
    memory = status.stx_dio_mem_align;
    if (granule == 0 || memory == 0) return;  // it says: not with this file
  }
  struct statvfs system{};
  if (fstatvfs(buffered_, &system) == 0 && is_power_of_two(static_cast<int64_t>(system.f_bsize))) {
    granule = std::max(granule, std::min(static_cast<int64_t>(system.f_bsize), largest_granule));
  }
  granule = std::max(granule, page_size());
  if (!is_power_of_two(granule) || granule > largest_granule || !is_power_of_two(memory)) return;
  // By descriptor, so that it is the same file, whatever has become of its name.
  const std::string same = "/proc/self/fd/" + std::to_string(buffered_);
  direct_ = retried([&] { return ::open(same.c_str(), (flags_ & ~O_CREAT) | O_DIRECT); });
  alignment_ = {granule, memory};
}

int64_t File::size() const {
  struct stat status{};
  if (fstat(buffered_, &status) == -1) fail("asking for the size of", path_);
  return status.st_size;
}

void File::sync() const {
  if (retried([&] { return fsync(buffered_); }) == -1) fail("syncing", path_);
}

void File::truncate(int64_t bytes) const {
  if (retried([&] { return ftruncate(buffered_, bytes); }) == -1) {
    fail("truncating to " + std::to_string(bytes) + " bytes", path_);
  }
}

void File::allocate(int64_t offset, int64_t bytes) const {
  if (bytes <= 0) return;
  const std::string what =
      "reserving " + std::to_string(bytes) + " bytes at offset " + std::to_string(offset) + " of";
  // Asked for more than there is, file systems hand out all they have, and then fail.
  const int64_t free = free_bytes();
  if (free >= 0 && offset + bytes - std::max(size(), offset) > free) fail(what, path_, ENOSPC);
  if (retried([&] { return fallocate(buffered_, 0, offset, bytes); }) == 0) return;
  if (errno == EOPNOTSUPP || errno == ENOSYS) return;
  fail(what, path_);
}

int64_t File::free_bytes() const {
  struct statvfs system{};
  return fstatvfs(buffered_, &system) == 0 ? free_bytes_of(system) : -1;
}

int64_t free_bytes(std::string path) {
  for (;;) {
    struct statvfs system{};
    if (statvfs(path.empty() ? "." : path.c_str(), &system) == 0) return free_bytes_of(system);
    if (path.empty() || path == "/") return -1;
    const size_t slash = path.find_last_of('/');
    path = slash == std::string::npos ? "" : path.substr(0, std::max(slash, size_t{1}));
  }
}

}  // namespace dsx::aio
