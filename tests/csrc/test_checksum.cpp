// Tests aio/checksum.h: published values, and every way to a checksum against its definition, bit
// by bit, at every length, address and cut. With the argument `time` it prints its speed instead.
#include "aio/checksum.h"

#include <chrono>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "expect.h"
#include "guarded.h"

namespace {

using dsx::aio::crc32c;
using Way = uint32_t (*)(const void*, size_t, uint32_t);

struct Named {
  const char* name;
  Way way;
};

// As RFC 3720 and Castagnoli's polynomial x^32 + x^28 + ... + 1 say it, one bit after another.
uint32_t by_definition(const unsigned char* data, size_t bytes) {
  uint32_t state = 0xffffffff;
  for (size_t i = 0; i < bytes; ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      const bool out = ((state ^ uint32_t(data[i] >> bit)) & 1) != 0;
      state = (state >> 1) ^ (out ? 0x82F63B78 : 0);
    }
  }
  return ~state;
}

std::vector<Named> ways() {
  std::vector<Named> all{{"crc32c", crc32c}, {"tables", dsx::aio::crc32c_by_tables}};
  if (dsx::aio::has_crc32c_instruction()) {
    all.push_back({"instruction", dsx::aio::crc32c_by_instruction});
  }
  return all;
}

std::vector<unsigned char> random_bytes(size_t bytes) {
  std::mt19937_64 random(3);
  std::vector<unsigned char> data(bytes);
  for (unsigned char& byte : data) byte = static_cast<unsigned char>(random());
  return data;
}

// RFC 3720, B.4, and the check value of the catalogues of checksums.
void test_published(const Named& named) {
  std::vector<unsigned char> zeros(32, 0), ones(32, 0xff), up(32), down(32);
  for (size_t i = 0; i < 32; ++i) {
    up[i] = static_cast<unsigned char>(i);
    down[i] = static_cast<unsigned char>(31 - i);
  }
  const auto is = [&](const void* data, size_t bytes, uint32_t wanted) {
    const uint32_t got = named.way(data, bytes, 0);
    expect(got == wanted, "%s: published %08x, got %08x", named.name, wanted, got);
  };
  is("123456789", 9, 0xE3069283);
  is("", 0, 0);
  is(zeros.data(), 32, 0x8A9136AA);
  is(ones.data(), 32, 0x62A8AB43);
  is(up.data(), 32, 0x46DD794E);
  is(down.data(), 32, 0x113FDB5C);
}

// Each length at each of sixteen addresses, ending where nothing more may be read.
void test_lengths(const Named& named) {
  const std::vector<unsigned char> data = random_bytes(3016);
  Guarded guarded;
  for (size_t bytes = 0; bytes <= 3000; ++bytes) {
    unsigned char* last = guarded.last<unsigned char>(int64_t(bytes));
    std::memcpy(last, data.data(), bytes);
    const uint32_t wanted = by_definition(data.data(), bytes);
    expect(named.way(last, bytes, 0) == wanted, "%s: %zu bytes before a page that is not there",
           named.name, bytes);
    const size_t shift = bytes % 16;
    expect(named.way(data.data() + shift, bytes, 0) == by_definition(data.data() + shift, bytes),
           "%s: %zu bytes at address %zu", named.name, bytes, shift);
  }
}

// Lengths around those where one loop hands over to the next, at every address modulo 16.
void test_blocks(const Named& named) {
  const std::vector<unsigned char> data = random_bytes(3 * 4096 * 2 + 800 + 16);
  for (size_t bytes : {767, 768, 769, 1536, 12287, 12288, 12289, 13056, 13063, 24576, 25375}) {
    for (size_t shift = 0; shift < 16; ++shift) {
      expect(named.way(data.data() + shift, bytes, 0) == by_definition(data.data() + shift, bytes),
             "%s: %zu bytes at address %zu", named.name, bytes, shift);
    }
  }
}

void test_seed(const Named& named) {
  const std::vector<unsigned char> data = random_bytes(14000);
  const uint32_t whole = by_definition(data.data(), data.size());
  for (size_t cut : {0, 1, 7, 8, 255, 768, 5000, 12288, 13999, 14000}) {
    const uint32_t first = named.way(data.data(), cut, 0);
    expect(named.way(data.data() + cut, data.size() - cut, first) == whole, "%s: cut at %zu",
           named.name, cut);
  }
}

void print_speed(const Named& named) {
  for (size_t bytes : {size_t{4096}, size_t{1} << 18, size_t{1} << 28}) {
    const std::vector<unsigned char> data(bytes, 7);
    double best = 0;
    uint32_t state = 0;
    for (int round = 0; round < 5; ++round) {
      const size_t calls = (size_t{1} << 28) / bytes;
      const auto start = std::chrono::steady_clock::now();
      for (size_t call = 0; call < calls; ++call) state = named.way(data.data(), bytes, state);
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
      best = std::max(best, double(bytes * calls) / seconds.count() / 1e9);
    }
    std::printf("%-12s %10zu bytes %6.2f GB/s (%08x)\n", named.name, bytes, best, state);
  }
}

}  // namespace

int main(int count, char** arguments) {
  const bool timing = count > 1 && std::string(arguments[1]) == "time";
  for (const Named& named : ways()) {
    if (timing) {
      print_speed(named);
      continue;
    }
    test_published(named);
    test_lengths(named);
    test_blocks(named);
    test_seed(named);
  }
  return timing ? 0 : finish();
}
