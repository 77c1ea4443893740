// softmax on CUDA: a team of threads for each row. What is only scaled, most often, and all else
// are compiled side by side.
#pragma once

#include "softmax/softmax.h"

#include "common/cuda/check.h"
#include "softmax/twice_read_cuda.cuh"
#include "softmax/row_powers_cuda.cuh"

namespace dsx {

#include "common/softmax_math.inl"

namespace {

using cuda::Floats;
using cuda::kRowVector;
using cuda::RowFloats;

// What takes part in one row, and its score. kPlain: all keys of the row do, scaled.
template <class T, bool kPlain>
struct RowScores {
  const Scores& scores;
  cuda::Column<T> first, end;  // keys
  float slope = 0;
  int64_t position = 0, mask_offset = 0;

  __device__ RowScores(const Scores& all, int64_t row, const Keys& keys)
      : scores(all), first(cuda::Column<T>(keys.first)), end(cuda::Column<T>(keys.end)) {
    if constexpr (kPlain) return;
    if (scores.slopes != nullptr) {
      slope = scores.slopes[scores.slope_rows.offset(row)];
      position = scores.position(row);
    }
    if (scores.mask.kind != SoftmaxMask::Kind::none) mask_offset = scores.mask.rows.offset(row);
  }

  // -inf for what takes no part, and in lanes beyond the row.
  __device__ RowFloats of(const RowFloats& x, cuda::Column<T> i, int count) const {
    RowFloats score = x * RowFloats(scores.scale);
    if constexpr (!kPlain) {
      if (scores.soft_cap > 0) score = capped(score, scores.soft_cap);
      if (scores.slopes != nullptr) {
        RowFloats ahead;  // of the key
        const float from = float(position - i);
#pragma unroll
        for (int k = 0; k < kRowVector; ++k) ahead.lanes[k] = from - float(k);
        score = biased(score, abs(ahead), slope);
      }
      if (scores.mask.kind != SoftmaxMask::Kind::none) score = masked(score, i, count);
    }
    if (i < first || i + kRowVector > end) {
#pragma unroll
      for (int k = 0; k < kRowVector; ++k) {
        if (i + k < first || i + k >= end) score.lanes[k] = -INFINITY;
      }
    }
    return score;
  }

  __device__ RowFloats masked(RowFloats score, int64_t i, int count) const {
    const SoftmaxMask& mask = scores.mask;
    const int64_t offset = mask_offset + i * mask.column_stride;
    if (mask.kind == SoftmaxMask::Kind::added) {
      return with_mask_added(score, added_mask(offset, count));
    }
    const uint8_t* bytes = static_cast<const uint8_t*>(mask.data) + offset;
    const bool zero_is_out = mask.kind == SoftmaxMask::Kind::takes_part;
    uint2 words{0, 0};
    if (mask.column_stride == 1 && count == kRowVector &&
        reinterpret_cast<uintptr_t>(bytes) % sizeof(words) == 0) {
      words = *reinterpret_cast<const uint2*>(bytes);
    } else {
#pragma unroll
      for (int k = 0; k < kRowVector; ++k) {
        const uint32_t byte = k < count ? bytes[k * mask.column_stride] : 0;
        (k < 4 ? words.x : words.y) |= byte << (8 * (k % 4));
      }
    }
#pragma unroll
    for (int k = 0; k < kRowVector; ++k) {
      const bool is_zero = (((k < 4 ? words.x : words.y) >> (8 * (k % 4))) & 0xff) == 0;
      if (is_zero == zero_is_out) score.lanes[k] = -INFINITY;
    }
    return score;
  }

  __device__ RowFloats added_mask(int64_t offset, int count) const {
    const SoftmaxMask& mask = scores.mask;
    const Pointer<Any> first = Pointer<Any>{const_cast<void*>(mask.data), mask.dtype} + offset;
    const int bytes = bytes_of(mask.dtype);
    if (mask.column_stride == 1 && count == kRowVector &&
        cuda::is_aligned<kRowVector>(first.address, bytes)) {
      return cuda::load<cuda::Access::vector, kRowVector>(first, count);
    }
    RowFloats values(0.0f);
    const char* address = static_cast<const char*>(first.address);
#pragma unroll
    for (int k = 0; k < kRowVector; ++k, address += mask.column_stride * bytes) {
      if (k >= count) continue;
      if (mask.dtype == Dtype::float32) {
        values.lanes[k] = *reinterpret_cast<const float*>(address);
        continue;
      }
      const uint16_t bits = *reinterpret_cast<const uint16_t*>(address);
      values.lanes[k] =
          mask.dtype == Dtype::bfloat16 ? cuda::widen(BFloat16{bits}) : cuda::widen(Half{bits});
    }
    return values;
  }
};

// What the powers of a row become results by.
struct RowTotals {
  float largest, inverse;  // of the sum of powers, relative to the largest

  __device__ explicit RowTotals(const cuda::RowPowers& all)
      : largest(all.largest), inverse(inverse_of(Floats<1>(all.sum)).lanes[0]) {}
  __device__ RowTotals(float of_largest, float of_inverse)
      : largest(of_largest), inverse(of_inverse) {}

  __device__ bool are_finite() const { return inverse >= 0; }  // otherwise a score is NaN or inf
  __device__ RowFloats result(const RowFloats& power, float relative_to) const {
    return power * RowFloats(cuda::RowPowers::factor(relative_to, largest) * inverse);
  }
  // Where they are not finite.
  __device__ RowFloats result(const RowFloats& score) const {
    return select(score == RowFloats(-INFINITY), RowFloats(0.0f), RowFloats(inverse));
  }
};

// Where a row is of one iteration, the powers of its scores stay in registers, relative to the
// largest score that there was when they were made.
template <class Team, class T, bool kPlain>
__global__ void __launch_bounds__(Team::kMostThreads, kPlain ? 2 : 1)
    softmax_kernel(const __grid_constant__ Softmax softmax, bool aligned) {
  using Column = cuda::Column<T>;
  constexpr bool kHeld = Team::kOneIteration && !std::is_same_v<T, Any>;
  constexpr auto kKept = kHeld ? cuda::Kept::no : cuda::Kept::yes;
  const int64_t row = ::min(Team::row(), softmax.rows - 1);
  const Keys keys = keys_of(softmax.scores, row, softmax.length);
  const RowScores<T, kPlain> scores(softmax.scores, row, keys);
  const Pointer<T> out = softmax.out.row<T>(row);
  const cuda::TwiceRead<Team, T, 1> reader{{softmax.x.row<T>(row)},
                                           Column(keys.first),
                                           Column(keys.end),
                                           Column(Team::row() < softmax.rows ? softmax.length : 0),
                                           aligned};
  const auto put = [&](Column i, int count, const RowFloats& result) {
    cuda::put<cuda::Stored::streamed>(out, i, count, aligned, result);
  };
  RowFloats held[kHeld ? Team::kVectors : 1];
  float largest[kHeld ? Team::kVectors : 1] = {};
  cuda::RowPowers powers;
  reader.template read_first<kKept>(
      [&](int v, Column i, int count, const RowFloats(&x)[1], bool is_read) {
    if (!is_read) return put(i, count, 0.0f);  // early, as it waits for nothing
    const RowFloats power = powers.add(scores.of(x[0], i, count));
    if constexpr (kHeld) {
      held[v] = power;
      largest[v] = powers.largest;
    }
  });
  cuda::RowPowers all = powers;
  all.add_over_team<Team>();
  const RowTotals totals(all);
  cuda::RowPowers again;
  const auto put_again = [&](int, Column i, int count, const RowFloats(&x)[1], bool is_read) {
    if (!is_read) return;
    const RowFloats score = scores.of(x[0], i, count);
    if (!totals.are_finite()) {
      put(i, count, totals.result(score));
    } else if constexpr (Team::kOneIteration) {  // the same bits as of those that were held
      const RowFloats power = again.add(score);
      put(i, count, totals.result(power, again.largest));
    } else {
      const RowFloats shift = cuda::RowPowers::shift(totals.largest);
      put(i, count, exp_of_negative(score - shift) * RowFloats(totals.inverse));
    }
  };
  if constexpr (!kHeld) return reader.read_again(put_again);
  if (!totals.are_finite()) return reader.read_slowly(put_again);
  reader.for_each_vector([&](int v, Column i, int count, bool is_read) {
    if (is_read) put(i, count, totals.result(held[v], largest[v]));
  });
}

// Launches the kernel of one of both kinds; only what is not plain may be Any.
template <bool kPlain>
void launch_softmax(const Softmax& softmax, bool whole, void* stream) {
  constexpr const char* op = "softmax";
  const bool aligned = cuda::all_aligned({softmax.x, softmax.out});
  cuda::with_looping_team<4>(softmax.rows, softmax.length, whole, softmax.x.dtype, op,
                             [&](auto team, auto storage, const cuda::TeamLaunch& launch) {
    using T = decltype(storage);
    if constexpr (!kPlain || !std::is_same_v<T, Any>) {
      softmax_kernel<decltype(team), T, kPlain>
          <<<launch.blocks, launch.threads, 0, cudaStream_t(stream)>>>(softmax, aligned);
    }
  });
  cuda::check(cudaGetLastError(), op);
}

}  // namespace

// Scores that are capped, biased or masked, or rows that are not whole.
void masked_softmax_cuda(const Softmax& softmax, bool whole, void* stream);

}  // namespace dsx
