// CRC-32C by tables, and by the instruction of x86-64 and ARM, which takes eight bytes a cycle but
// three cycles for each answer: three parts of the data run interleaved and are then combined.
#include "aio/checksum.h"

#include <array>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#define DSX_CRC32C_TARGET [[gnu::target("sse4.2")]]
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace dsx::aio {
namespace {

static_assert(std::endian::native == std::endian::little, "the tables take the low byte first");

constexpr uint32_t kPolynomial = 0x82F63B78;  // bits reversed: the lowest bit is that of x^31

using Table = std::array<uint32_t, 256>;
using Tables = std::array<Table, 8>;

// Row k has the checksum state that a byte leaves after k more bytes of zero.
constexpr Tables make_byte_tables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t state = byte;
    for (int bit = 0; bit < 8; ++bit) state = (state >> 1) ^ ((state & 1) ? kPolynomial : 0);
    tables[0][byte] = state;
  }
  for (size_t row = 1; row < 8; ++row) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[row - 1][byte];
      tables[row][byte] = (before >> 8) ^ tables[0][before & 0xff];
    }
  }
  return tables;
}

constexpr Tables kBytes = make_byte_tables();

uint64_t load(const unsigned char* bytes) {
  uint64_t word;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

uint32_t step_by_tables(uint32_t state, const unsigned char* bytes) {
  const uint64_t word = load(bytes) ^ state;
  uint32_t next = 0;
  for (size_t i = 0; i < 8; ++i) next ^= kBytes[7 - i][(word >> (8 * i)) & 0xff];
  return next;
}

#if defined(__x86_64__) || defined(__aarch64__)

using Columns = std::array<uint32_t, 32>;  // what a linear function makes of each single bit

constexpr uint32_t apply(const Columns& function, uint32_t state) {
  uint32_t sum = 0;
  for (size_t bit = 0; state != 0; ++bit, state >>= 1) sum ^= (state & 1) ? function[bit] : 0;
  return sum;
}

// The function that a block of zeros is to the state, as four tables, one for each byte of it.
template <size_t kBlock>
struct Shift {
  static_assert(std::has_single_bit(kBlock));
  std::array<Table, 4> tables{};

  constexpr Shift() {
    Columns function{kPolynomial};  // one bit of zero
    for (size_t bit = 1; bit < 32; ++bit) function[bit] = uint32_t{1} << (bit - 1);
    for (size_t bits = 1; bits < 8 * kBlock; bits *= 2) {
      Columns twice{};
      for (size_t bit = 0; bit < 32; ++bit) twice[bit] = apply(function, function[bit]);
      function = twice;
    }
    for (size_t row = 0; row < 4; ++row) {
      for (size_t byte = 1; byte < 256; ++byte) {
        const size_t low = static_cast<size_t>(std::countr_zero(byte));
        tables[row][byte] = tables[row][byte & (byte - 1)] ^ function[8 * row + low];
      }
    }
  }

  uint32_t operator()(uint32_t state) const {
    return tables[0][state & 0xff] ^ tables[1][(state >> 8) & 0xff] ^
           tables[2][(state >> 16) & 0xff] ^ tables[3][state >> 24];
  }
};

template <size_t kBlock>
constexpr Shift<kBlock> kShift{};

#if defined(__x86_64__)

DSX_CRC32C_TARGET inline uint32_t step(uint32_t state, uint64_t word) {
  return static_cast<uint32_t>(_mm_crc32_u64(state, word));
}
DSX_CRC32C_TARGET inline uint32_t step(uint32_t state, unsigned char byte) {
  return _mm_crc32_u8(state, byte);
}

#else  // in assembly: compilers differ in how a function asks for an extension

#define DSX_CRC32C_TARGET

inline uint32_t step(uint32_t state, uint64_t word) {
  asm(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(state) : "r"(word));
  return state;
}
inline uint32_t step(uint32_t state, unsigned char byte) {
  asm(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(state) : "r"(uint32_t{byte}));
  return state;
}

#endif

// Takes as many times three blocks as there are, and moves `at` and `bytes` past them.
template <size_t kBlock>
DSX_CRC32C_TARGET uint32_t take_blocks(uint32_t state, const unsigned char*& at, size_t& bytes) {
  for (; bytes >= 3 * kBlock; at += 3 * kBlock, bytes -= 3 * kBlock) {
    uint32_t second = 0, third = 0;
    for (size_t i = 0; i < kBlock; i += 8) {
      state = step(state, load(at + i));
      second = step(second, load(at + kBlock + i));
      third = step(third, load(at + 2 * kBlock + i));
    }
    state = kShift<kBlock>(kShift<kBlock>(state) ^ second) ^ third;
  }
  return state;
}

#endif

bool cpu_has_instruction() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_supports("sse4.2");
#elif defined(__ARM_FEATURE_CRC32)
  return true;
#elif defined(__aarch64__)
  constexpr unsigned long kHasCrc32 = 1UL << 7;  // HWCAP_CRC32 of asm/hwcap.h
  return (getauxval(AT_HWCAP) & kHasCrc32) != 0;
#else
  return false;
#endif
}

}  // namespace

bool has_crc32c_instruction() {
  static const bool has = cpu_has_instruction();
  return has;
}

uint32_t crc32c_by_tables(const void* data, size_t bytes, uint32_t seed) {
  const auto* at = static_cast<const unsigned char*>(data);
  uint32_t state = ~seed;
  for (; bytes >= 8; at += 8, bytes -= 8) state = step_by_tables(state, at);
  for (; bytes > 0; ++at, --bytes) state = (state >> 8) ^ kBytes[0][(state ^ *at) & 0xff];
  return ~state;
}

#if defined(__x86_64__) || defined(__aarch64__)

DSX_CRC32C_TARGET uint32_t crc32c_by_instruction(const void* data, size_t bytes, uint32_t seed) {
  const auto* at = static_cast<const unsigned char*>(data);
  uint32_t state = ~seed;
  state = take_blocks<4096>(state, at, bytes);
  state = take_blocks<256>(state, at, bytes);
  for (; bytes >= 8; at += 8, bytes -= 8) state = step(state, load(at));
  for (; bytes > 0; ++at, --bytes) state = step(state, *at);
  return ~state;
}

#else

uint32_t crc32c_by_instruction(const void* data, size_t bytes, uint32_t seed) {
  return crc32c_by_tables(data, bytes, seed);
}

#endif

uint32_t crc32c(const void* data, size_t bytes, uint32_t seed) {
  return has_crc32c_instruction() ? crc32c_by_instruction(data, bytes, seed)
                                  : crc32c_by_tables(data, bytes, seed);
}

}  // namespace dsx::aio
