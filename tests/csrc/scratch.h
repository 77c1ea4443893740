// Files for tests of I/O: a folder that goes away, contents that can be recognised, and every
// backend.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <system_error>
#include <vector>

#include "aio/backend_factory.h"
#include "expect.h"

// Ends the program when it hangs: a lost wake or completion shows as a wait without end.
inline void end_when_stuck() { alarm(150); }

// A new folder in the one that the command line or TMPDIR names, else /var/tmp: on a real disk.
class Folder {
 public:
  Folder(int argc, char** argv) {
    const char* parent = argc > 1 ? argv[1] : std::getenv("TMPDIR");
    std::string pattern = std::string(parent != nullptr ? parent : "/var/tmp") + "/aio-XXXXXX";
    if (mkdtemp(pattern.data()) == nullptr) std::perror(pattern.c_str()), std::abort();
    std::filesystem::permissions(pattern, std::filesystem::perms(0755));
    path_ = pattern;
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  const std::string& path() const { return path_; }

  // The path of a file in it that has not been asked for before.
  std::string fresh() { return path_ + "/" + std::to_string(++count_); }

 private:
  std::string path_;
  int count_ = 0;
};

using Bytes = std::vector<char>;

// Bytes that differ from place to place and from seed to seed.
inline Bytes sample(int64_t bytes, uint64_t seed) {
  std::vector<uint64_t> words(static_cast<size_t>(bytes / 8 + 1));
  std::mt19937_64 random(seed);
  for (uint64_t& word : words) word = random();
  Bytes result(static_cast<size_t>(bytes));
  if (bytes > 0) std::memcpy(result.data(), words.data(), result.size());
  return result;
}

inline Bytes content(const std::string& path) {
  Bytes bytes(std::filesystem::file_size(path));
  std::ifstream file(path, std::ios::binary);
  file.read(bytes.data(), std::streamsize(bytes.size()));
  bytes.resize(static_cast<size_t>(file.gcount()));
  return bytes;
}

inline void store(const std::string& path, const Bytes& bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), std::streamsize(bytes.size()));
}

// Bytes that start at any distance from a page's beginning.
class Memory {
 public:
  explicit Memory(int64_t bytes, int64_t misaligned = 0)
      : bytes_(bytes),
        pages_(static_cast<char*>(
            std::aligned_alloc(4096, size_t(bytes + misaligned + 8191) & ~size_t{4095}))),
        address_(pages_ + misaligned) {
    std::memset(address_, '!', static_cast<size_t>(bytes));
  }
  Memory(const Bytes& content, int64_t misaligned) : Memory(int64_t(content.size()), misaligned) {
    std::copy(content.begin(), content.end(), address_);
  }
  ~Memory() { std::free(pages_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  char* address() const { return address_; }
  int64_t bytes() const { return bytes_; }
  Bytes copy() const { return {address_, address_ + bytes_}; }

 private:
  int64_t bytes_;
  char* pages_;
  char* address_;
};

// Calls test(kind) for each backend that this machine has, and says which it lacks.
template <class Test>
void for_each_backend(Test&& test) {
  for (dsx::aio::BackendKind kind : dsx::aio::backend_kinds) {
    try {
      dsx::aio::make_backend(kind, 1);
    } catch (const std::system_error& error) {
      std::printf("skipped: %s, errno %d: %s\n", name_of(kind), error.code().value(), error.what());
      expect(kind != dsx::aio::BackendKind::threads, "threads are everywhere");
      continue;
    }
    test(kind);
  }
}
