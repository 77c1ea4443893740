// Queries as tensor cores take them beside keys: 8 rows of a head, as columns. Of a lane, `row` is
// lane / 4 and `pair` lane % 4.
#pragma once

#include "attention/decode/decode_pipeline_cuda.cuh"

namespace dsx::cuda {

// Two floats as the halves of a word, the first one lower.
template <class T>
__device__ inline uint32_t rounded_pair(float first, float second) {
  uint32_t word = 0;
#if __CUDA_ARCH__ >= 800
  if constexpr (T::kQuietNan == BFloat16::kQuietNan) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  }
#endif
  return word;
}

// A power of 2 that takes the largest of some numbers to 2^14, and the one that takes it back, so
// that all fit into 16 bits.
struct Fit {
  float factor, inverse;
  __device__ explicit Fit(float largest) {
    const int exponent = ::max(__float_as_int(largest) >> 23, 15);
    factor = __int_as_float((268 - exponent) << 23);
    inverse = __int_as_float((exponent - 14) << 23);
  }
};

// The new token of a slot, as its own block has made it: what is in the cache may be what was there
// before.
template <int kWidth>
struct NewToken {
  static constexpr int kStride = kWidth + 8;  // rows are read without two in the same bank
  alignas(16) uint16_t queries[kTileRows][kStride];
  alignas(16) char keys[2 * kWidth], values[2 * kWidth];  // as they are stored, and zeros
  float key_scale, value_scale;
};

// Queries of 8 rows, as matrices that keys are multiplied by: this lane's part of row `row`.
template <class Q, class Kind, int kWidth>
struct Queries {
  static constexpr int kSteps = kWidth / 16;
  uint32_t words[kSteps][2];
  float inverse[2];  // what products of rows 2 pair and 2 pair + 1 are to be multiplied by

  // Begins to read. What is not there is 0.
  __device__ void read(const DecodeAttention& call, const Task& task, int row_tile) {
    const int number = row_tile * kTileRows + threadIdx.x % 32 / 4;
    const int group = int(call.group), token = int(quotient(number, group));
    const bool there = token < task.count;
    const int head = task.head * group + number - token * group;
    const Q* const row = call.q.at<Q>(task.batch, there ? token : 0, there ? head : 0).address;
    const bool aligned = reinterpret_cast<uintptr_t>(row) % 4 == 0;
    if (__all_sync(0xffffffff, aligned)) {
      read_pairs(there ? int(call.kv.width) : 0,
                 [&](int element) { return *reinterpret_cast<const uint32_t*>(row + element); });
    } else {
      read_pairs(there ? int(call.kv.width) : 0, [&](int element) {
        return row[element].bits | uint32_t(row[element + 1].bits) << 16;
      });
    }
  }

  // The same of rows of one token in shared memory.
  __device__ void read_near(const uint16_t* rows, int stride, int count) {
    const int number = threadIdx.x % 32 / 4;
    const uint16_t* const row = rows + number * stride;
    read_pairs(number < count ? kWidth : 0,
               [&](int element) { return *reinterpret_cast<const uint32_t*>(row + element); });
  }

  // Makes of what was read what codes are multiplied by.
  __device__ void prepare() {
    inverse[0] = inverse[1] = 1;
    if constexpr (Kind::kQuantized) {
      if constexpr (std::is_same_v<Q, BFloat16>) fit();
      if constexpr (std::is_same_v<Kind, Int8Kv>) {
#pragma unroll
        for (auto& pair : words) {
          const uint32_t first = __byte_perm(pair[0], pair[1], 0x5410);
          pair[1] = __byte_perm(pair[0], pair[1], 0x7632);
          pair[0] = first;
        }
      }
    }
  }

 private:
  template <class Read>
  __device__ void read_pairs(int width, const Read& pair_at) {
    const int pair = threadIdx.x % 4;
#pragma unroll
    for (int k = 0; k < 2 * kSteps; ++k) {
      const int element =
          k / 2 * 16 + (Kind::kQuantized ? pair * 4 + k % 2 * 2 : pair * 2 + k % 2 * 8);
      words[k / 2][k % 2] = element < width ? pair_at(element) : 0;
    }
  }

  // From bfloat16 to float16, by a power of 2 for each row.
  __device__ void fit() {
    uint32_t largest = 0;  // as bits
#pragma unroll
    for (const auto& pair : words) {
#pragma unroll
      for (uint32_t word : pair) {
        const uint32_t high = word >> 16 & 0x7fff, low = word & 0x7fff;
        if (high < 0x7f80) largest = ::max(largest, high);
        if (low < 0x7f80) largest = ::max(largest, low);
      }
    }
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
      largest = ::max(largest, __shfl_xor_sync(0xffffffff, largest, distance));
    }
    const Fit fit(__int_as_float(int(largest << 16)));
#pragma unroll
    for (auto& pair : words) {
#pragma unroll
      for (uint32_t& word : pair) {
        word = rounded_pair<Half>(__int_as_float(int(word << 16)) * fit.factor,
                                  __int_as_float(int(word & 0xffff0000)) * fit.factor);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      inverse[i] = __shfl_sync(0xffffffff, fit.inverse, (threadIdx.x % 4 * 2 + i) * 4);
    }
  }
};

}  // namespace dsx::cuda
