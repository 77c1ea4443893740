// Codes of eight neighbouring elements in the registers of a CUDA thread.
#pragma once

#include "common/cuda/check.h"
#include "common/cuda/launch.cuh"
#include "common/cuda/rows.cuh"
#include "quantization/quantize.h"

namespace dsx {

#include "common/noise_math.inl"
#include "quantization/quantize_math.inl"

namespace cuda {

constexpr int kEight = 8;

// The lowest byte of each of four integers.
__device__ inline uint32_t lowest_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// Codes as bytes, four in a word.
template <int kCount>
struct Codes {
  uint32_t words[kCount / 4];

  __device__ uint32_t at(int k) const { return words[k / 4] >> (8 * (k % 4)) & 0xff; }
};

// Two numbers as 8-bit floats in the lower half: one instruction where there is one.
template <class Bits>
__device__ inline uint32_t encode_pair(float a, float b) {
#if __CUDA_ARCH__ >= 890
  uint16_t pair;
  if constexpr (std::is_same_v<Bits, E4m3>) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(b), "f"(a));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(b), "f"(a));
  }
  return pair;
#else
  return Bits::template encode<uint32_t>(a) | Bits::template encode<uint32_t>(b) << 8;
#endif
}

template <class Bits>
__device__ inline float2 decode_pair(uint32_t pair) {
#if __CUDA_ARCH__ >= 890
  uint32_t halves;
  if constexpr (std::is_same_v<Bits, E4m3>) {
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(uint16_t(pair)));
  } else {
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(uint16_t(pair)));
  }
  return {__half2float(__ushort_as_half(uint16_t(halves))),
          __half2float(__ushort_as_half(uint16_t(halves >> 16)))};
#else
  return {Bits::template decode<float>(pair & 0xff), Bits::template decode<float>(pair >> 8)};
#endif
}

// The codes of some elements, of which the first one's random bits are those of `noise`, in the
// lowest bits of a word each, with anything above.
template <class Coding, int kCount>
__device__ inline void encode_each(const Coding& coding, const Floats<kCount>& x, const Grid& grid,
                                   const Noise& noise, uint32_t (&codes)[kCount]) {
  const bool random = Coding::kIsInteger && noise.on;
  if (!random) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) codes[k] = coding.template encode<uint32_t>(x.lanes[k], grid);
  } else if constexpr (Coding::kIsInteger) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const uint32_t bits = random_bits(noise, uint32_t(k));
      codes[k] = coding.template encode<uint32_t>(x.lanes[k], grid, bits);
    }
  }
}

template <class Coding, int kCount>
__device__ inline Codes<kCount> encode_all(const Coding& coding, const Floats<kCount>& x,
                                           const Grid& grid, const Noise& noise) {
  uint32_t codes[kCount];
  encode_each(coding, x, grid, noise, codes);
  Codes<kCount> packed;
#pragma unroll
  for (int k = 0; k < kCount; k += 4) {
    packed.words[k / 4] =
        lowest_bytes(codes[k], codes[k + 1], codes[k + 2], codes[k + 3]) & grid.mask;
  }
  return packed;
}

// Eight codes of 4 bits in a word.
__device__ inline uint32_t lowest_nibbles(const uint32_t* codes) {
  const uint32_t even = lowest_bytes(codes[0], codes[2], codes[4], codes[6]);
  const uint32_t odd = lowest_bytes(codes[1], codes[3], codes[5], codes[7]);
  return blend_bits(0x0f0f0f0f, even, odd << 4);
}

template <class Bits, QuantFormat kFormat, int kCount>
__device__ inline Codes<kCount> encode_all(const Float8Coding<Bits, kFormat>&,
                                           const Floats<kCount>& x, const Grid& grid,
                                           const Noise& /*noise*/) {
  Codes<kCount> packed;
#pragma unroll
  for (int k = 0; k < kCount; k += 4) {
    const float* four = x.lanes + k;
    const uint32_t low = encode_pair<Bits>(four[0] * grid.inverse, four[1] * grid.inverse);
    const uint32_t high = encode_pair<Bits>(four[2] * grid.inverse, four[3] * grid.inverse);
    packed.words[k / 4] = __byte_perm(low, high, 0x5410) & grid.mask;
  }
  return packed;
}

template <class Coding, int kCount>
__device__ inline Floats<kCount> decode_all(const Coding& coding, const Codes<kCount>& codes) {
  Floats<kCount> numbers;
#pragma unroll
  for (int k = 0; k < kCount; ++k) numbers.lanes[k] = coding.template decode<float>(codes.at(k));
  return numbers;
}

template <class Bits, QuantFormat kFormat, int kCount>
__device__ inline Floats<kCount> decode_all(const Float8Coding<Bits, kFormat>&,
                                            const Codes<kCount>& codes) {
  Floats<kCount> numbers;
#pragma unroll
  for (int k = 0; k < kCount; k += 2) {
    const float2 pair = decode_pair<Bits>(codes.words[k / 4] >> (8 * (k % 4)) & 0xffff);
    numbers.lanes[k] = pair.x;
    numbers.lanes[k + 1] = pair.y;
  }
  return numbers;
}

// A byte and what is above it come together in one instruction.
template <bool kHasOffset, int kCount>
__device__ inline Floats<kCount> decode_all(const IntegerCoding<kHasOffset>& coding,
                                            const Codes<kCount>& codes) {
  Floats<kCount> numbers;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const uint32_t word = codes.words[k / 4] ^ coding.flip * 0x01010101;
    const uint32_t bits = __byte_perm(word, kAboveCode, 0x7440 | k % 4);
    numbers.lanes[k] = number_of_integer<float>(bits, coding.unsigned_zero);
  }
  return numbers;
}

// The same of eight codes in the nibbles of a word, which are not brought in order before.
template <bool kHasOffset>
__device__ inline Floats<kEight> decode_nibbles(const IntegerCoding<kHasOffset>& coding,
                                                uint32_t word) {
  const uint32_t even = word & 0x0f0f0f0f, odd = word >> 4 & 0x0f0f0f0f;
  Floats<kEight> numbers;
#pragma unroll
  for (int k = 0; k < kEight; ++k) {
    const uint32_t bits = __byte_perm(k % 2 == 0 ? even : odd, kAboveCode, 0x7440 | k / 2);
    numbers.lanes[k] = number_of_integer<float>(bits, coding.unsigned_zero);
  }
  return numbers;
}

template <int kCount>
__device__ inline Floats<kCount> scaled_all(Floats<kCount> numbers, const ScaleAndOffset& group) {
#pragma unroll
  for (int k = 0; k < kCount; ++k) numbers.lanes[k] = scaled(numbers.lanes[k], group);
  return numbers;
}

// Bytes of which each has a code of 4 bits, as a word of these, and the other way round.
__device__ inline uint32_t nibbles_of(uint32_t first, uint32_t second) {
  const uint32_t low = first & 0x0f0f0f0f, high = second & 0x0f0f0f0f;
  return __byte_perm(low | low >> 4, high | high >> 4, 0x6420);
}
__device__ inline Codes<kEight> codes_of_nibbles(uint32_t word) {
  const uint32_t even = word & 0x0f0f0f0f, odd = word >> 4 & 0x0f0f0f0f;
  return {__byte_perm(even, odd, 0x5140), __byte_perm(even, odd, 0x7362)};
}

constexpr int kRun = 16;  // elements next to each other that a thread has, all aligned

// Rounds a run, from element i of a row on, and stores its codes, or what these stand for.
template <class T, class Coding>
__device__ inline void put_run(const Quantize& call, const Coding& coding,
                               const RowVector<T, kRun>& run, const Grid& grid,
                               const ScaleAndOffset& scale, int64_t row, int64_t i) {
  const Floats<kRun> x = floats_of(run);
  const Noise noise = noise_from(call.noise, row * call.length + i);
  if (call.codes == nullptr) {
    const auto codes = encode_all(coding, x, grid, noise);
    return put<Stored::streamed>(call.out.even_row<T>(row), i, kRun, true,
                                 scaled_all(decode_all(coding, codes), scale));
  }
  uint8_t* codes_of_row = call.codes + row * bytes_of_row(call.format, call.length);
  if constexpr (Coding::kMayBeNibbles) {
    if (bits_of_code(call.format) == 4) {
      uint32_t codes[kRun];
      encode_each(coding, x, grid, noise, codes);
      const uint2 words{lowest_nibbles(codes) & grid.mask, lowest_nibbles(codes + 8) & grid.mask};
      return __stcs(reinterpret_cast<uint2*>(codes_of_row + i / 2), words);
    }
  }
  const auto codes = encode_all(coding, x, grid, noise);
  const auto& w = codes.words;
  __stcs(reinterpret_cast<uint4*>(codes_of_row + i), uint4{w[0], w[1], w[2], w[3]});
}

__device__ inline Floats<kEight> decode_nibbles(const Nf4Coding& coding, uint32_t word) {
  return decode_all(coding, codes_of_nibbles(word));
}

// Stores the first `count` codes, from element i of a row on, which is even; all of them at once if
// they are aligned.
__device__ inline void store_codes(uint8_t* row, int64_t i, int count, bool aligned, bool is_nibble,
                                   const Codes<kEight>& codes) {
  if (is_nibble) {
    const uint32_t word = nibbles_of(codes.words[0], codes.words[1]);
    if (aligned) return __stcs(reinterpret_cast<uint32_t*>(row + i / 2), word);
#pragma unroll
    for (int k = 0; k < kEight; k += 2) {
      const uint32_t byte = word >> (4 * k) & (k + 1 < count ? 0xff : 0x0f);
      if (k < count) row[i / 2 + k / 2] = uint8_t(byte);
    }
  } else {
    const uint2 words{codes.words[0], codes.words[1]};
    if (aligned) return __stcs(reinterpret_cast<uint2*>(row + i), words);
#pragma unroll
    for (int k = 0; k < kEight; ++k) {
      if (k < count) row[i + k] = uint8_t(codes.at(k));
    }
  }
}

__device__ inline Codes<kEight> load_codes(const uint8_t* row, int64_t i, int count, bool aligned,
                                           bool is_nibble) {
  if (is_nibble) {
    uint32_t word = 0;
    if (aligned) {
      word = __ldcs(reinterpret_cast<const uint32_t*>(row + i / 2));
    } else {
#pragma unroll
      for (int k = 0; k < kEight; k += 2) {
        if (k < count) word |= uint32_t(row[i / 2 + k / 2]) << (4 * k);
      }
    }
    return codes_of_nibbles(word);
  }
  Codes<kEight> codes{};
  if (aligned) {
    const uint2 words = __ldcs(reinterpret_cast<const uint2*>(row + i));
    return {words.x, words.y};
  }
#pragma unroll
  for (int k = 0; k < kEight; ++k) {
    if (k < count) codes.words[k / 4] |= uint32_t(row[i + k]) << (8 * (k % 4));
  }
  return codes;
}

// What elements of a row are measured for: the first `count` of them.
template <class T, int kCount>
__device__ inline Largest measure_all(const RowVector<T, kCount>& x, int count, bool asymmetric) {
  Largest found;
  if constexpr (sizeof(T) == 2) {
    if (!asymmetric) {  // two magnitudes in each word
      uint32_t pair = 0;
#pragma unroll
      for (int k = 0; k < x.kAccesses; ++k) {
        const uint4& w = x.words[k];
        pair = __vmaxs2(pair, __vmaxs2(__vmaxs2(w.x & 0x7fff7fff, w.y & 0x7fff7fff),
                                       __vmaxs2(w.z & 0x7fff7fff, w.w & 0x7fff7fff)));
      }
      const uint32_t largest = dsx::max(pair & 0xffff, pair >> 16);
      found.magnitude_or_order = dsx::bits_of(widen(T{uint16_t(largest)}));
      return found;
    }
  }
  const Floats<kCount> values = floats_of(x);
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const uint32_t bits = dsx::bits_of(values.lanes[k]);
    if (std::is_same_v<T, Any> && k >= count) continue;
    const uint32_t order = asymmetric ? order_of(bits) : magnitude_of(bits);
    found.magnitude_or_order = dsx::max(found.magnitude_or_order, order);
    if (asymmetric) found.flipped = dsx::max(found.flipped, ~order);
  }
  return found;
}

__device__ inline Largest larger(const Largest& a, const Largest& b) {
  return {dsx::max(a.magnitude_or_order, b.magnitude_or_order), dsx::max(a.flipped, b.flipped)};
}

// Over so many neighbouring lanes of a warp, a power of two; all of the warp take part.
__device__ inline Largest largest_of_lanes(Largest found, int lanes, bool asymmetric) {
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    Largest other;
    other.magnitude_or_order = __shfl_xor_sync(~0u, found.magnitude_or_order, distance);
    if (asymmetric) other.flipped = __shfl_xor_sync(~0u, found.flipped, distance);
    found = larger(found, other);
  }
  return found;
}

// Of the elements of a row that this thread has: every `step` of them eight, from `first` to `end`.
__device__ inline Largest largest_of_eights(Pointer<Any> x, int64_t first, int64_t end,
                                            int64_t step, bool asymmetric) {
  Largest found;
  for (int64_t i = first; i < end; i += step) {
    const int count = int(end - i < kEight ? end - i : kEight);
    const bool aligned = is_aligned<kEight>((x + i).address, bytes_of(x.dtype));
    found = larger(found, measure_all(fetch<kEight>(x, i, count, aligned), count, asymmetric));
  }
  return found;
}

// Calls body(first, last, column) for those of `count` elements, of which the first one is number i
// of a row, that are in each group.
template <class Body>
__device__ inline void for_each_group(int64_t group, int64_t i, int count, const Body& body) {
  int64_t column = quotient(i, group);
  for (int k = 0; k < count;) {
    const int64_t left = (column + 1) * group - i;
    const int last = left < count ? int(left) : count;
    body(k, last, column);
    k = last;
    ++column;
  }
}

__device__ inline void store_scale(const Groups& call, int64_t group, const ScaleAndOffset& scale) {
  if (call.scales != nullptr) call.scales[group] = scale.scale;
  if (call.offsets != nullptr) call.offsets[group] = scale.offset;
}

__device__ inline ScaleAndOffset stored_scale(const Groups& call, int64_t group) {
  return {call.scales[group], call.offsets != nullptr ? call.offsets[group] : -0.0f};
}

}  // namespace cuda
}  // namespace dsx
