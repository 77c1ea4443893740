// Codes of a packed weight as numbers and as floats, a run of 16 bytes at a time, on CUDA.
#pragma once

#include "common/cuda/rows.cuh"
#include "quantization/packed_weight.h"

namespace dsx::cuda {

constexpr int kCodesOfWord = 32 / DSX_BITS, kRun = kRunBytes * 8 / DSX_BITS;  // elements

// As nf4_level, which would be a table on the stack of every thread.
__constant__ constexpr float kNf4Levels[16] = {
    nf4_level(0),  nf4_level(1),  nf4_level(2),  nf4_level(3), nf4_level(4),  nf4_level(5),
    nf4_level(6),  nf4_level(7),  nf4_level(8),  nf4_level(9), nf4_level(10), nf4_level(11),
    nf4_level(12), nf4_level(13), nf4_level(14), nf4_level(15)};

// The levels in shared memory, where the threads of a warp read different ones at once. All threads
// of a block call it.
__device__ inline const float* levels_nearby() {
  if (DSX_BITS == 8) return nullptr;
  __shared__ float levels[16];
  if (threadIdx.x < 16) levels[threadIdx.x] = kNf4Levels[threadIdx.x];
  __syncthreads();
  return levels;
}

// The codes of a run. Levels are those of levels_nearby; null: they are not asked for.
class RunOfCodes {
 public:
  __device__ RunOfCodes(const PackedWeight& weight, const float* levels, uint4 words)
      : weight_(weight), levels_(levels), words_{words.x, words.y, words.z, words.w} {}

  __device__ RunOfCodes(const PackedWeight& weight, const float* levels, int64_t row, int64_t run)
      : weight_(weight), levels_(levels) {
    const uint8_t* const at = weight.codes + row * weight.row_bytes + run * kRunBytes;
    if (reinterpret_cast<uintptr_t>(at) % 16 == 0) {
      const uint4 words = __ldcs(reinterpret_cast<const uint4*>(at));
      words_[0] = words.x, words_[1] = words.y, words_[2] = words.z, words_[3] = words.w;
    } else {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        words_[w] = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) words_[w] |= uint32_t(at[4 * w + i]) << 8 * i;
      }
    }
  }

  __device__ uint32_t word(int w) const { return words_[w]; }

  // The eight neighbours from element 8 p on, as numbers.
  __device__ void numbers(int p, float (&values)[8]) const {
    const bool symmetric = weight_.offsets == nullptr;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int number = j % 2 * (kCodesOfWord / 2) + p;  // of a code in its word
      const uint32_t code = words_[j / 2] >> number * DSX_BITS & (1u << DSX_BITS) - 1;
      values[j] = number_of(code, symmetric);
    }
    if (weight_.format != QuantFormat::nf4) return;
#pragma unroll
    for (float& value : values) value = levels_[int(value) + 8];
  }

 private:
  // Behind the exponent of 2^23 a code is a float that is so much more.
  __device__ static float number_of(uint32_t code, bool symmetric) {
    if (DSX_BITS == 8) code ^= 0x80;  // without sign, 128 more
    const float zero = symmetric ? (DSX_BITS == 4 ? 8.0f : 128.0f) : 0.0f;
    return __uint_as_float(0x4b000000 | code) - (8388608.0f + zero);
  }

  const PackedWeight& weight_;
  const float* const levels_;
  uint32_t words_[4];
};

// Scale and offset of element k of a row; no offset: -0, which changes no sum.
struct ScaleOf {
  float scale, offset;

  __device__ ScaleOf(float of_scale, float of_offset) : scale(of_scale), offset(of_offset) {}
  __device__ ScaleOf(const PackedWeight& weight, int64_t row, int64_t group) {
    const int64_t place = group * weight.scale_pitch + row;
    scale = __ldg(weight.scales + place);
    offset = weight.offsets == nullptr ? -0.0f : __ldg(weight.offsets + place);
  }
};

// The division of 32 bits costs a fraction of that of 64.
__device__ inline int64_t group_of(const PackedWeight& weight, int64_t k) {
  return quotient(k, weight.group);
}

__device__ inline void scale_all(const ScaleOf& scale, float (&values)[8]) {
#pragma unroll
  for (float& value : values) value = __fmaf_rn(value, scale.scale, scale.offset);
}

// Eight neighbours of a run as floats, of which the first one is element k of a row; those behind
// the end are 0.
__device__ inline void floats_of(const PackedWeight& weight, const RunOfCodes& run, int64_t row,
                                 int64_t k, int p, float (&values)[8]) {
  run.numbers(p, values);
  const int64_t left = weight.length - k;
  const int64_t first = group_of(weight, k);
  if (left >= 8 && k + 7 < (first + 1) * weight.group) {
    return scale_all(ScaleOf(weight, row, first), values);
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (j >= left) {
      values[j] = 0;
    } else {
      const ScaleOf scale(weight, row, group_of(weight, k + j));
      values[j] = __fmaf_rn(values[j], scale.scale, scale.offset);
    }
  }
}

constexpr int kUnpackThreads = 128, kMostGridRows = 65535;
constexpr int kUnpackedRows = 4;  // of a thread at a time, whose scales lie in 16 bytes

// Whether rows begin at multiples of 16 bytes wherever they are, and all eights have one scale.
inline bool are_eights_even(const PackedWeight& weight, const Rows& out) {
  const auto far = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 16; };
  return weight.length % 8 == 0 && (weight.group % 8 == 0 || weight.group >= weight.length) &&
         (far(weight.codes) | far(weight.scales) | far(weight.offsets)) == 0 && all_aligned({out});
}

// A thread has eight elements of some rows, so that the threads of a warp write without gaps.
template <class T>
__global__ void __launch_bounds__(kUnpackThreads)
    unpack_kernel(const __grid_constant__ PackedWeight weight, const __grid_constant__ Rows out) {
  constexpr int kEights = kRun / 8;
  const float* const levels = levels_nearby();
  const int64_t i = int64_t(blockIdx.x) * kUnpackThreads + threadIdx.x, k = 8 * i;
  if (k >= weight.length) return;
  const int64_t left = weight.length - k;
  for (int64_t row = blockIdx.y; row < weight.rows; row += gridDim.y) {
    const RunOfCodes run(weight, levels, row, i / kEights);
    Floats<8> values;
    floats_of(weight, run, row, k, int(i % kEights), values.lanes);
    const auto target = Pointer<T>::to(out.data, out.dtype) + (row * out.pitch + k);
    if (left >= 8 && is_aligned<8>(target.address, sizeof(T))) {
      store<Access::vector>(target, values, 8);
    } else {
      store<Access::single>(target, values, int(left < 8 ? left : 8));
    }
  }
}

// The same of even eights: some rows at a time, whose loads are under way together.
template <class T>
__global__ void __launch_bounds__(kUnpackThreads)
    unpack_even_kernel(const __grid_constant__ PackedWeight weight,
                       const __grid_constant__ Rows out) {
  constexpr int kEights = kRun / 8, kRows = kUnpackedRows;
  const float* const levels = levels_nearby();
  const int64_t i = int64_t(blockIdx.x) * kUnpackThreads + threadIdx.x, k = 8 * i;
  if (k >= weight.length) return;
  const int64_t first_scale = group_of(weight, k) * weight.scale_pitch;
  const uint8_t* const codes = weight.codes + i / kEights * kRunBytes;
  const int p = int(i % kEights);
  const auto target = Pointer<T>::to(out.data, out.dtype) + k;
  for (int64_t row = blockIdx.y * int64_t(kRows); row < weight.rows;
       row += gridDim.y * int64_t(kRows)) {
    const auto four = [&](const float* all, float (&of_rows)[kRows]) {
      const float4 values = __ldg(reinterpret_cast<const float4*>(all + (first_scale + row)));
      of_rows[0] = values.x, of_rows[1] = values.y, of_rows[2] = values.z, of_rows[3] = values.w;
    };
    const int count = int(::min(weight.rows - row, int64_t(kRows)));
    uint4 words[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t there = row + ::min(r, count - 1);
      words[r] = __ldcs(reinterpret_cast<const uint4*>(codes + there * weight.row_bytes));
    }
    float scales[kRows], offsets[kRows] = {-0.0f, -0.0f, -0.0f, -0.0f};  // see ScaleOf
    four(weight.scales, scales);
    if (weight.offsets != nullptr) four(weight.offsets, offsets);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      Floats<8> values;
      RunOfCodes(weight, levels, words[r]).numbers(p, values.lanes);
      scale_all(ScaleOf(scales[r], offsets[r]), values.lanes);
      if (r < count) put(target, (row + r) * out.pitch, 8, true, values);
    }
  }
}

}  // namespace dsx::cuda
