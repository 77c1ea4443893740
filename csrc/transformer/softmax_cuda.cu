// softmax on CUDA: each team of threads takes a few rows one after the other, and reads each twice.
#include "transformer/softmax.h"

#include "common/cuda/check.h"
#include "common/cuda/twice_read.cuh"
#include "transformer/row_powers_cuda.cuh"

namespace dsx {

#include "transformer/softmax_math.inl"

namespace {

using cuda::Floats;
using cuda::kRowVector;
using Values = Floats<kRowVector>;

// What takes part in one row, and its score. kPlain: all keys of the row do, scaled.
template <bool kPlain>
struct RowScores {
  const Scores& scores;
  Keys keys;
  float slope = 0;
  int64_t position = 0, mask_place = 0;

  __device__ RowScores(const Scores& all, int64_t row, Keys seen) : scores(all), keys(seen) {
    if constexpr (kPlain) return;
    if (scores.slopes != nullptr) {
      slope = scores.slopes[scores.slope_rows.place(row)];
      position = scores.position(row);
    }
    if (scores.mask.kind != SoftmaxMask::Kind::none) mask_place = scores.mask.rows.place(row);
  }

  // -inf for what takes no part, and in lanes beyond the row.
  __device__ Values of(const Values& x, int64_t i, int count) const {
    Values score = x * Values(scores.scale);
    if constexpr (!kPlain) {
      if (scores.soft_cap > 0) score = capped(score, scores.soft_cap);
      if (scores.slopes != nullptr) {
        Values ahead;  // of the key
        const float from = float(position - i);
#pragma unroll
        for (int k = 0; k < kRowVector; ++k) ahead.lanes[k] = from - float(k);
        score = biased(score, abs(ahead), slope);
      }
      if (scores.mask.kind != SoftmaxMask::Kind::none) score = masked(score, i, count);
    }
    if (i < keys.first || i + kRowVector > keys.end) {
#pragma unroll
      for (int k = 0; k < kRowVector; ++k) {
        if (i + k < keys.first || i + k >= keys.end) score.lanes[k] = -INFINITY;
      }
    }
    return score;
  }

  __device__ Values masked(Values score, int64_t i, int count) const {
    const SoftmaxMask& mask = scores.mask;
    const int64_t place = mask_place + i * mask.column_stride;
    if (mask.kind == SoftmaxMask::Kind::added) {
      return with_mask_added(score, added_mask(place, count));
    }
    const uint8_t* bytes = static_cast<const uint8_t*>(mask.data) + place;
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

  __device__ Values added_mask(int64_t place, int count) const {
    const SoftmaxMask& mask = scores.mask;
    const Pointer<Any> first = Pointer<Any>{const_cast<void*>(mask.data), mask.dtype} + place;
    const int bytes = bytes_of(mask.dtype);
    if (mask.column_stride == 1 && count == kRowVector &&
        cuda::is_aligned<kRowVector>(first.address, bytes)) {
      return cuda::load<cuda::Access::vector, kRowVector>(first, count);
    }
    Values values(0.0f);
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

template <class Team, class T, bool kPlain>
__global__ void __launch_bounds__(Team::kMostThreads)
    softmax_kernel(const __grid_constant__ Softmax softmax, bool aligned) {
  using Reader = cuda::TwiceRead<Team, T, 1>;
  // Scores are made once where the team can hold them, unless that is cheaper done twice.
  constexpr bool kHeld = !kPlain && Team::kVectors > 0;
  const auto row_of = [&](int64_t row) {
    if (row >= softmax.rows) return typename Reader::Row{{}, 0, 0, 0};
    const int64_t length = softmax.length;
    const Keys keys = keys_of(softmax.scores, row, length);
    return typename Reader::Row{{softmax.x.row<T>(row)}, keys.first, keys.end, length};
  };
  Reader reader(aligned);
  reader.begin(row_of(int64_t(blockIdx.x) * Team::kTeams + Team::team()));
  cuda::for_each_row_of_team<Team>(softmax.rows, [&](int64_t row, int64_t next, int turn) {
    const auto current = row_of(row), following = row_of(next);
    const int64_t place = ::min(row, softmax.rows - 1);
    const RowScores<kPlain> scores(softmax.scores, place, {current.first, current.end});
    const Pointer<T> out = softmax.out.row<T>(place);
    Values held[kHeld ? Team::kVectors : 1];
    cuda::RowPowers powers;
    reader.first(current, following, [&](int v, int64_t i, int count, const Values(&x)[1]) {
      const Values score = scores.of(x[0], i, count);
      if constexpr (kHeld) held[v] = score;
      powers.add(score);
    });
    powers.template add_over_team<Team>(turn);
    const Values shift = powers.shift(powers.largest);
    const float one_inverse = inverse_of(Floats<1>(powers.sum)).lanes[0];
    const Values inverse = one_inverse;
    const bool is_finite = one_inverse >= 0;  // otherwise a score is NaN or inf
    reader.second(current, following,
                  [&](int v, int64_t i, int count, const Values(&x)[1], bool is_read) {
      Values result = 0.0f;
      if (is_read) {
        Values score;
        if constexpr (kHeld) {
          score = held[v];
        } else {
          score = scores.of(x[0], i, count);
        }
        result = exp_of_negative(score - shift) * inverse;
        if (!is_finite) result = select(score == Values(-INFINITY), Values(0.0f), inverse);
      }
      cuda::put(out, i, count, aligned, result);
    });
  });
}

constexpr const char* kOp = "softmax";

bool is_plain(const Scores& scores) {
  return scores.soft_cap == 0 && scores.mask.kind == SoftmaxMask::Kind::none &&
         scores.slopes == nullptr;
}

}  // namespace

void softmax_cuda(const Softmax& softmax, void* stream) {
  if (softmax.rows == 0 || softmax.length == 0) return;
  cuda::check(cudaPeekAtLastError(), kOp);  // of somebody before
  const auto rows = {softmax.x, softmax.out};
  const bool whole = cuda::are_whole(rows, softmax.length, softmax.x.dtype);
  const bool aligned = cuda::all_aligned(rows);
  cuda::with_twice_read_team<1>(softmax.rows, softmax.length, whole, softmax.x.dtype, kOp,
                                [&](auto team, auto storage, const cuda::TwiceReadLaunch& launch) {
    using Team = decltype(team);
    using T = decltype(storage);
    const auto run = [&](auto* kernel) {
      cuda::allow_shared_memory(kernel, launch, kOp);
      kernel<<<launch.blocks, launch.threads, launch.shared_bytes, cudaStream_t(stream)>>>(softmax,
                                                                                           aligned);
    };
    if constexpr (!std::is_same_v<T, Any>) {
      if (is_plain(softmax.scores)) return run(softmax_kernel<Team, T, true>);
    }
    run(softmax_kernel<Team, T, false>);
  });
  cuda::check(cudaGetLastError(), kOp);
}

}  // namespace dsx
