// Tiles of 16 keys or values as tensor cores take them, straight from global memory: an instruction
// reads whole lines of 128 bytes, 16 bytes for each lane, and what a lane has read is what it
// multiplies. That may be as elements of a head, keys and rows of a product may come in any order,
// so long as both factors have the same one. Of a lane, `row` is lane / 4 and `pair` lane % 4.
#pragma once

#include "transformer/decode_work_cuda.cuh"
#include "transformer/mma_cuda.cuh"

namespace dsx::cuda {

constexpr int kTileTokens = 16;

// Reads 8 or 16 bytes, or zeros.
template <int kWords>
__device__ inline void read_words(uint32_t* words, const char* address, bool there) {
  static_assert(kWords == 2 || kWords == 4);
  if (!there) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = 0;
    return;
  }
  if constexpr (kWords == 4) {
    asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(address));
  } else {
    asm volatile("ld.global.L1::no_allocate.v2.b32 {%0, %1}, [%2];"
                 : "=r"(words[0]), "=r"(words[1])
                 : "l"(address));
  }
}

// Two products or differences of numbers of 16 bits.
template <class T>
__device__ inline uint32_t times(uint32_t a, uint32_t b) {
  uint32_t result;
  if constexpr (T::kQuietNan == BFloat16::kQuietNan) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(0x80008000u));
  } else {
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  }
  return result;
}
template <class T>
__device__ inline uint32_t minus(uint32_t a, uint32_t b) {
  uint32_t result;
  if constexpr (T::kQuietNan == BFloat16::kQuietNan) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(b), "r"(0xbf80bf80u), "r"(a));
  } else {
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  }
  return result;
}

// (a & mask) | bits, as one instruction: with two numbers in its place it would be two.
template <uint32_t kMask>
__device__ inline uint32_t masked_or(uint32_t a, uint32_t bits) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(a), "n"(kMask), "r"(bits));
  return result;
}
// The number, in a register.
template <uint32_t kNumber>
__device__ inline uint32_t in_register() {
  uint32_t result;
  asm volatile("mov.b32 %0, %1;" : "=r"(result) : "n"(kNumber));
  return result;
}

// Bytes 0 and 2 of a word of codes, or 1 and 3, as two numbers of type T, which holds all of them.
template <class T, class Kind, bool kOdd>
__device__ inline uint32_t widened_pair(uint32_t word) {
  constexpr bool kIsBf16 = T::kQuietNan == BFloat16::kQuietNan;
  if constexpr (std::is_same_v<Kind, Int8Kv>) {
    if constexpr (kOdd) word >>= 8;
    if constexpr (kIsBf16) {  // 128 + the lower 7 bits, and 128 or 256 by the sign
      const uint32_t bits = in_register<0x43004300>();
      return minus<T>(masked_or<0x007f007f>(word, bits), masked_or<0x00800080>(word, bits));
    } else {  // 1024 + 128 + the number
      const uint32_t bits = in_register<0x64006400>();
      return minus<T>(masked_or<0x00ff00ff>(word ^ 0x00800080, bits), 0x64806480);
    }
  } else {  // bits where they belong, then what exponents are off by; 480 for NaN
    const uint32_t sign = (kOdd ? word : word << 8) & 0x80008000;
    if constexpr (kIsBf16) {
      return times<T>(masked_or<0x07f007f0>(kOdd ? word >> 4 : word << 4, sign), 0x7b807b80);
    } else {
      return times<T>(masked_or<0x3f803f80>(kOdd ? word >> 1 : word << 7, sign), 0x5c005c00);
    }
  }
}

// The highest bit of each byte: whether it is the code of NaN.
__device__ inline uint32_t nan_codes(uint32_t word) {
  return ((word & 0x7f7f7f7f) + 0x01010101) & 0x80808080;
}

// How a tile of kWidth elements of each of its tokens lies in the registers of a warp. Of keys, a
// lane has a part of number row / 2 of each four, in their first or second half as row is even or
// odd; of values, a part of number `pair` of each four. Heads of fewer elements are as if followed
// by zeros, unless they are kWhole.
template <class Kind, int kWidth, bool kWhole>
struct Tile {
  static constexpr int kBytes = Kind::kQuantized ? 1 : 2;
  static constexpr int kReadBytes = kWidth * kBytes < 128 ? 8 : 16;  // by a lane, at a time
  static constexpr int kReads = kWidth * kBytes / (8 * kReadBytes);  // for a token
  static constexpr int kFours = kTileTokens / 4;
  static constexpr int kWordsOfRead = kReadBytes / 4, kWordsOfFour = kReads * kWordsOfRead;
  static constexpr int kWords = kFours * kWordsOfFour;
  static constexpr int kElements = kReadBytes / kBytes;  // that a lane reads at a time

  uint32_t words[kWords];
  float scales[kFours];  // of tokens number `pair` of each four

  // Tokens from number `first` on, of which `last` is read in place of those behind it.
  template <bool kKeys>
  __device__ void read(const char* tokens, int of_token, int first, int last, int bytes) {
    const int row = threadIdx.x % 32 / 4, pair = threadIdx.x % 4;
    const int offset = (kKeys ? row % 2 * 4 + pair : row) * kReadBytes;
#pragma unroll
    for (int four = 0; four < kFours; ++four) {
      const int number = ::min(first + four * 4 + (kKeys ? row / 2 : pair), last);
      const char* token = tokens + offset + int64_t(number) * of_token;
#pragma unroll
      for (int i = 0; i < kReads; ++i) {
        read_words<kWordsOfRead>(words + four * kWordsOfFour + i * kWordsOfRead,
                                 token + i * 8 * kReadBytes,
                                 kWhole || i * 8 * kReadBytes + offset < bytes);
      }
    }
  }
  __device__ void read_scales(const float* tokens, int first, int last) {
#pragma unroll
    for (int four = 0; four < kFours; ++four) {
      scales[four] = tokens[::min(first + four * 4 + int(threadIdx.x) % 4, last)];
    }
  }

  // A product with keys has so many steps of 16 elements of each of their halves.
  static constexpr int kKeySteps = kWidth / 32;
  // The element of a head that is first, or second, in word `word` of a step, in that half.
  __device__ static int key_element(int step, int half, int word, int second, int pair) {
    const int begin = step * 4 / kElements * 8 * kElements + (half * 4 + pair) * kElements;
    const int in_read = step * 4 % kElements;
    return begin + in_read + (Kind::kQuantized ? second * 2 + word : word * 2 + second);
  }
  // A matrix of 16 elements by 8 columns: for each of four keys those of its first half, then those
  // of the second.
  template <class T>
  __device__ void key_matrix(int four, int step, uint32_t (&b)[2]) const {
    const uint32_t* const of_four = words + four * kWordsOfFour;
    if constexpr (Kind::kQuantized) {
      b[0] = widened_pair<T, Kind, false>(of_four[step]);
      b[1] = widened_pair<T, Kind, true>(of_four[step]);
    } else {
      b[0] = of_four[2 * step];
      b[1] = of_four[2 * step + 1];
    }
  }
  // Whether key number `pair` of a four has a code of NaN.
  __device__ bool has_nan_code(int four) const {
    uint32_t any = 0;
#pragma unroll
    for (int i = 0; i < kWordsOfFour; ++i) any |= nan_codes(words[four * kWordsOfFour + i]);
    return (__ballot_sync(0xffffffff, any != 0) >> (threadIdx.x % 4 * 8) & 0xff) != 0;
  }

  static constexpr int kValueSteps = kWidth / 16;
  // The element of a head that is row `row` of step `step` of a product with values; the next one
  // is row + 8.
  __device__ static int value_element(int step) {
    const int row = threadIdx.x % 32 / 4;
    return step * 2 / kElements * 8 * kElements + row * kElements + step * 2 % kElements;
  }
  // A matrix of 16 elements by 16 tokens: of each four, number `pair` is together with that of the
  // next four.
  template <class T>
  __device__ void value_matrix(int step, uint32_t (&a)[4]) const {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const uint32_t* const of_four = words + 2 * k * kWordsOfFour;
      const uint32_t* const of_next = of_four + kWordsOfFour;
      if constexpr (Kind::kQuantized) {
        const uint32_t both =
            __byte_perm(of_four[step / 2], of_next[step / 2], step % 2 == 0 ? 0x5410 : 0x7632);
        a[2 * k] = widened_pair<T, Kind, false>(both);
        a[2 * k + 1] = widened_pair<T, Kind, true>(both);
      } else {
        a[2 * k] = __byte_perm(of_four[step], of_next[step], 0x5410);
        a[2 * k + 1] = __byte_perm(of_four[step], of_next[step], 0x7632);
      }
    }
  }
  // Whether any value of this lane is not finite. Those of 16 bits become 0, codes have become 480.
  template <class T>
  __device__ bool set_apart() {
    if constexpr (std::is_same_v<Kind, Int8Kv>) return false;
    uint32_t found = 0;
#pragma unroll
    for (uint32_t& word : words) {
      if constexpr (Kind::kQuantized) {
        found |= nan_codes(word);
      } else {
        constexpr uint32_t kExponent = T::kQuietNan == BFloat16::kQuietNan ? 0x7f80 : 0x7c00;
        uint32_t bad = (word & kExponent) == kExponent ? 0xffffu : 0u;
        if ((word >> 16 & kExponent) == kExponent) bad |= 0xffff0000u;
        word &= ~bad;
        found |= bad;
      }
    }
    return found != 0;
  }
};

}  // namespace dsx::cuda
