// decode_attention on CUDA by tensor cores, for keys and values that can be read 16 bytes at a
// time. A block takes a chunk, each of its warps a page of it, and 8 rows of a head: they are the
// columns of what is multiplied, K q and V^T p. Another warp reads the pages, ahead of them.
//
// Elements of a head and tokens of a page may come in any order, so long as both factors of a
// product have the same one. Of a lane, `row` is lane / 4 and `pair` lane % 4. In both products its
// columns are 2 pair and 2 pair + 1; of the scores it has tokens 8 k + row.
#pragma once

#include "transformer/decode_any_cuda.cuh"
#include "transformer/decode_codes_cuda.cuh"
#include "transformer/decode_ring_cuda.cuh"

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

// Queries of 8 rows, as matrices that keys are multiplied by: this lane's part of row `row`.
template <class Q, class Kind, int kWidth>
struct Queries {
  static constexpr int kSteps = kWidth / 16;
  uint32_t words[kSteps][2];
  float inverse[2];  // what products of rows 2 pair and 2 pair + 1 are to be multiplied by

  // Begins to read. What is not there is 0.
  __device__ void read(const DecodeAttention& call, const Unit& unit, int part) {
    const int number = part * kUnitRows + threadIdx.x % 32 / 4;
    const int group = int(call.group), token = int(quotient(number, group));
    const bool there = token < unit.count;
    const int head = unit.head * group + number - token * group;
    const Q* const row = call.q.at<Q>(unit.batch, there ? token : 0, there ? head : 0).address;
    const bool aligned = reinterpret_cast<uintptr_t>(row) % 4 == 0;
    if (__all_sync(0xffffffff, aligned)) {
      read_pairs(there ? int(call.kv.width) : 0, [&](int element) {
        return *reinterpret_cast<const uint32_t*>(row + element);
      });
    } else {
      read_pairs(there ? int(call.kv.width) : 0, [&](int element) {
        return row[element].bits | uint32_t(row[element + 1].bits) << 16;
      });
    }
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
      const int element = k / 2 * 16 + (Kind::kQuantized ? pair * 4 + k % 2 * 2 : pair * 2 + k % 2 * 8);
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

// What the warps have found for 8 rows, each in its page.
template <int kWidth>
struct Found {
  static constexpr int kStride = kWidth + 4;
  float values[kPageWarps][kUnitRows][kStride];
  Powers powers[kPageWarps][kUnitRows];
};

// A warp's work on its page of each unit.
template <class Q, class Kind, int kWidth>
class PageAttention {
  using M = std::conditional_t<Kind::kQuantized, Half, Q>;  // of what is multiplied
  using Slot = cuda::Slot<Kind, kWidth>;
  using Found = cuda::Found<kWidth>;
  static constexpr int kTiles = kPageTokens / 16, kTilesOfSlot = kSlotTokens / 16;
  static constexpr int kLoads = Slot::kRow / 32;  // of 32 bytes of 16 tokens
  static constexpr int kSteps = kWidth / 16, kStepsOfBox = Slot::kElements / 16;

 public:
  __device__ PageAttention(const DecodeAttention& call, Ring& ring, const char* slots, int count,
                           Found& found)
      : call_(call), ring_(ring), found_(found), turn_{count} {
    const int row = lane_ % 8, next_tokens = lane_ / 8 % 2, next_piece = lane_ / 16;
    slots_ = slots + warp_ * Slot::kSize;
    scales_ = reinterpret_cast<const float*>(slots + count * kPageWarps * Slot::kSize) +
              warp_ * Slot::kScales;
    const int first = swizzled<Slot::kRow>(row, next_piece) * 16;
    of_lane_ = next_tokens * 8 * Slot::kRow + first / Slot::kRow * Slot::kRow;
    piece_ = first % Slot::kRow;
  }

  __device__ void read_first() {
    if (ring_.unit(0).there) queries_.read(call_, ring_.unit(0), 0);
    is_new_ = true;
  }

  // Leaves in found_ what part number `part` of the rows of unit number i find.
  __device__ void run(int i, int part, int parts) {
    const Unit& unit = ring_.unit(i);
    if (is_new_) prepare(unit, part);
    begin_ = (unit.chunk * kChunkPages + warp_) * kPageTokens;
#ifdef LAB_NOCOMPUTE
    const bool used = false;
#else
    const bool used = begin_ < unit.length && begin_ + kPageTokens > unit.seen_begin;
#endif
    // Whether there are tokens that some row does not see.
    is_edge_ = begin_ < unit.seen_by_last || begin_ + kPageTokens > unit.position(0) + 1;
    Powers powers[2] = {{-INFINITY, 0}, {-INFINITY, 0}};
    each_out([](int, float& out) { out = 0; });
    if (used) {
      multiply_keys();
    } else {
      skip();
    }
    is_new_ = read_next(i, part, parts);
    const bool wrong = ring_.wrong[i % Ring::kUnits][warp_];
    if (used) {
      weigh(powers);
      take_values(unit.length);
    } else {
      skip();
    }
    if (wrong) powers[0] = powers[1] = {-INFINITY, NAN};
    const int rows = unit.count * int(call_.group) - part * kUnitRows;
    meet();  // the others have read what was there
    store(rows, powers);
    meet();
  }

 private:
  // Of the warps that multiply.
  __device__ static void meet() {
    asm volatile("bar.sync 1, %0;" ::"n"(32 * kPageWarps) : "memory");
  }

  __device__ void prepare(const Unit& unit, int part) {
    queries_.prepare();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int number = part * kUnitRows + lane_ % 4 * 2 + i;
      const int token = int(quotient(number, call_.group));
      const int head = unit.head * int(call_.group) + number - token * int(call_.group);
      scoring_[i] = {};
      if (token < unit.count) scoring_[i].read(call_, head, unit.position(token));
    }
  }
  // Begins to read the rows that come next, if they are others.
  __device__ bool read_next(int i, int part, int parts) {
    const bool more = part + 1 < parts;
    const Unit &unit = ring_.unit(i), &next = more ? unit : ring_.unit(i + 1);
    if (!next.there || (parts == 1 && unit.goes_on_in(next))) return false;
    queries_.read(call_, next, more ? part + 1 : 0);
    return true;
  }

  __device__ const char* wait(const Turn& turn) const {
    ring_.full[turn.slot][warp_].wait(turn.parity);
    return slots_ + turn.slot * (kPageWarps * Slot::kSize);
  }
  __device__ void release() {
    __syncwarp();
    if (lane_ == 0) ring_.empty[turn_.slot].arrive();
    turn_.go_on();
  }
  __device__ void skip() {
#pragma unroll 1
    for (int k = 0; k < Slot::kOfPage; ++k) {
      wait(turn_);
      release();
    }
  }

  // Where this lane begins to read matrices: 32 bytes of 16 tokens.
  __device__ int place_of(int tile, int load) const {
    return of_lane_ + tile * 16 * Slot::kRow + (piece_ ^ load * 32);
  }
  // Scales of this lane's tokens, with the first slot of a page.
  __device__ void read_scales(float (&scales)[8]) const {
    wait(turn_);
    const float* const all = scales_ + turn_.slot * (kPageWarps * Slot::kScales);
#pragma unroll
    for (int k = 0; k < 8; ++k) scales[k] = all[k * 8 + lane_ / 4];
  }

  __device__ void multiply_keys() {
    float scales[8];
    if constexpr (Kind::kQuantized) read_scales(scales);
#pragma unroll
    for (auto& of_tile : weights_) {
#pragma unroll
      for (float& each : of_tile) each = 0;
    }
#pragma unroll
    for (int k = 0; k < Slot::kOfPage; ++k) {
      const char* const slot = wait(turn_);
      const int box = k / Slot::kParts, first = k % Slot::kParts * kTilesOfSlot;
#pragma unroll
      for (int load = 0; load < kLoads; ++load) {
#pragma unroll
        for (int t = 0; t < kTilesOfSlot; ++t) {
          float(&products)[4] = weights_[first + t];
          uint32_t m[4];
          load_matrices<false>(m, slot + place_of(t, load));
          if constexpr (Kind::kQuantized) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const uint32_t keys[4] = {
                  widened<Kind, false>(m[2 * i]), widened<Kind, false>(m[2 * i + 1]),
                  widened<Kind, true>(m[2 * i]), widened<Kind, true>(m[2 * i + 1])};
              multiply_matrices<M>(products, keys,
                                   queries_.words[box * kStepsOfBox + 2 * load + i]);
            }
          } else {
            multiply_matrices<M>(products, m, queries_.words[box * kStepsOfBox + load]);
          }
        }
      }
      release();
    }
    if constexpr (Kind::kQuantized) {
#pragma unroll
      for (int k = 0; k < 16; ++k) {
        weight(k / 2, k % 2) *= scales[k / 2] * queries_.inverse[k % 2];
      }
    }
  }

  // Calls do_it(i, sum) for each sum of a value, of row i of this lane's.
  template <class Do>
  __device__ void each_out(const Do& do_it) {
#pragma unroll
    for (auto& of_box : out_) {
#pragma unroll
      for (auto& of_step : of_box) {
#pragma unroll
        for (int i = 0; i < 4; ++i) do_it(i % 2, of_step[i]);
      }
    }
  }
  // Of this lane's token number k, and its row i.
  __device__ float& weight(int k, int i) { return weights_[k / 2][k % 2 * 2 + i]; }
  __device__ int key(int k) const { return begin_ + k * 8 + lane_ / 4; }

  // From products to scores: -inf for what is not seen.
  __device__ void score() {
    if (!is_edge_ && call_.soft_cap <= 0 && call_.alibi_slopes == nullptr) {
#pragma unroll
      for (int k = 0; k < 16; ++k) weight(k / 2, k % 2) *= call_.scale;
      return;
    }
#pragma unroll
    for (int k = 0; k < 16; ++k) {
      weight(k / 2, k % 2) = scored(scoring_[k % 2], call_, weight(k / 2, k % 2), key(k / 2));
    }
  }
  // Not inline, as it is long.
  __device__ __noinline__ static float scored(Scoring scoring, const DecodeAttention& call,
                                              float product, int key) {
    return scoring.score(call, product, key);
  }

  // From scores to weights.
  __device__ void weigh(Powers (&powers)[2]) {
    score();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float& largest = powers[i].largest;
#pragma unroll
      for (int k = 0; k < 8; ++k) largest = ::fmaxf(largest, weight(k, i));  // unless it is NaN
    }
    over_rows([&](int i, int distance) {
      float& largest = powers[i].largest;
      largest = ::fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, distance));
    });
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float shift = shift_of_largest(powers[i].largest);
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        weight(k, i) = fast_exp_of_negative(weight(k, i) - shift);
        powers[i].sum += weight(k, i);
      }
    }
    over_rows([&](int i, int distance) {
      powers[i].sum += __shfl_xor_sync(0xffffffff, powers[i].sum, distance);
    });
  }
  // Both columns of a lane, and all distances to lanes that have the same ones.
  template <class Do>
  __device__ static void over_rows(const Do& do_it) {
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) {
      do_it(0, distance);
      do_it(1, distance);
    }
  }

  // Weights of codes: with their scales, and made to fit.
  __device__ void take_scales(float (&inverse)[2]) {
    float scales[8], largest[2] = {0, 0};
    read_scales(scales);
#pragma unroll
    for (int k = 0; k < 16; ++k) weight(k / 2, k % 2) *= scales[k / 2];
    if (is_edge_) {  // scales may be anything where no token is
#pragma unroll
      for (int k = 0; k < 16; ++k) {
        if (!scoring_[k % 2].sees(key(k / 2))) weight(k / 2, k % 2) = 0;
      }
    }
#pragma unroll
    for (int k = 0; k < 16; ++k) {
      const float magnitude = ::fabsf(weight(k / 2, k % 2));
      if (magnitude < INFINITY) largest[k % 2] = ::fmaxf(largest[k % 2], magnitude);
    }
    over_rows([&](int i, int distance) {
      largest[i] = ::fmaxf(largest[i], __shfl_xor_sync(0xffffffff, largest[i], distance));
    });
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Fit fit(largest[i]);
#pragma unroll
      for (int k = 0; k < 8; ++k) weight(k, i) *= fit.factor;
      inverse[i] = fit.inverse;
    }
  }

  __device__ void take_values(int length) {
    float inverse[2];
    if constexpr (Kind::kQuantized) take_scales(inverse);
#pragma unroll
    for (int k = 0; k < Slot::kOfPage; ++k) {
      const char* const slot = wait(turn_);
      const int first = k % Slot::kParts * kTilesOfSlot;
      auto& out = out_[k / Slot::kParts];
      if (is_edge_ && !std::is_same_v<Kind, Int8Kv>) set_apart(first * 2, out, length);
#pragma unroll
      for (int t = 0; t < kTilesOfSlot; ++t) {
        const float(&mine)[4] = weights_[first + t];
        const uint32_t weights[2] = {transposed_matrix(rounded_pair<M>(mine[0], mine[1])),
                                     transposed_matrix(rounded_pair<M>(mine[2], mine[3]))};
#pragma unroll
        for (int load = 0; load < kLoads; ++load) {
          uint32_t m[4];
          load_matrices<true>(m, slot + place_of(t, load));
          if constexpr (Kind::kQuantized) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const uint32_t low = for_values<Kind>(m[2 * i]), high = for_values<Kind>(m[2 * i + 1]);
              const uint32_t values[4] = {widened<Kind, false>(low), widened<Kind, true>(low),
                                          widened<Kind, false>(high), widened<Kind, true>(high)};
              multiply_matrices<M>(out[2 * load + i], values, weights);
            }
          } else {
            const uint32_t values[4] = {m[0], m[2], m[1], m[3]};
            multiply_matrices<M>(out[load], values, weights);
          }
        }
      }
      release();
    }
    if constexpr (Kind::kQuantized) {
      each_out([&](int i, float& out) { out *= inverse[i]; });
    }
  }

  // The element of a head that out_[step][0] and [1] are of, or [2] and [3].
  __device__ int element(int step, int second) const {
    const int row = lane_ / 4;
    return step * 16 + (Kind::kQuantized ? row * 2 + second : row + second * 8);
  }

  // Takes what is not finite out of the values in a slot, and adds it to the rows that see it: it
  // must not reach the others. The slot's tokens are the page's from number first * 8 on.
  __device__ __forceinline__ void set_apart(int first, float (&out)[kStepsOfBox][4], int length) {
    char* const slot = const_cast<char*>(wait(turn_));
    bool any = false;
    const auto each_word = [&](const auto& do_it) {
#pragma unroll 4
      for (int i = lane_ * 4; i < Slot::kSize; i += 32 * 4) {
        do_it(*reinterpret_cast<uint32_t*>(slot + i));
      }
    };
    each_word([&](uint32_t& word) { any |= not_finite(word) != 0; });
    if (!__any_sync(0xffffffff, any)) return;
    const int begin = begin_ + first * 8;
    float mine[kSlotTokens / 8][2];  // of tokens to come, in turn
#pragma unroll
    for (int k = 0; k < kSlotTokens / 8 * 2; ++k) mine[k / 2][k % 2] = weight(first + k / 2, k % 2);
#pragma unroll 1
    for (int token = 0; token < ::min(kSlotTokens, length - begin); ++token) {
      float weights[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        weights[i] = __shfl_sync(0xffffffff, mine[0][i], token % 8 * 4 + lane_ % 4);
#pragma unroll
        for (int k = 1; k < kSlotTokens / 8; ++k) {
          if (token % 8 == 7) mine[k - 1][i] = mine[k][i];
        }
      }
#pragma unroll
      for (int step = 0; step < 2 * kStepsOfBox; ++step) {
        const int byte = element(step / 2, step % 2) * Slot::kBytes;
        const char* const piece = slot + swizzled<Slot::kRow>(token, byte / 16) * 16;
        const float value = element_at<Kind>(piece, call_.kv.dtype, byte % 16 / Slot::kBytes);
        if (isfinite(value)) continue;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (scoring_[i].sees(begin + token)) out[step / 2][step % 2 * 2 + i] += weights[i] * value;
        }
      }
    }
    __syncwarp();
    each_word([](uint32_t& word) { word &= ~not_finite(word); });
    wrote_before_fetch();
    __syncwarp();
  }
  // The bits of elements of a word that are not finite.
  __device__ static uint32_t not_finite(uint32_t word) {
    if constexpr (Kind::kQuantized) return (nan_codes(word) >> 7) * 0xff;
    constexpr uint32_t kExponent = M::kQuietNan == BFloat16::kQuietNan ? 0x7f80 : 0x7c00;
    const uint32_t low = (word & kExponent) == kExponent ? 0xffffu : 0u;
    return (word >> 16 & kExponent) == kExponent ? low | 0xffff0000u : low;
  }

  __device__ void store(int rows, const Powers (&powers)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = lane_ % 4 * 2 + i;
      if (row >= rows) continue;
      if (lane_ < 4) found_.powers[warp_][row] = powers[i];
      float* const values = found_.values[warp_][row];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const float(&out)[4] = out_[step / kStepsOfBox][step % kStepsOfBox];
        if constexpr (Kind::kQuantized) {
          *reinterpret_cast<float2*>(values + element(step, 0)) =
              make_float2(out[i], out[2 + i]);
        } else {
          values[element(step, 0)] = out[i];
          values[element(step, 1)] = out[2 + i];
        }
      }
    }
  }

  const DecodeAttention& call_;
  Ring& ring_;
  Found& found_;
  Turn turn_;
  const int lane_ = threadIdx.x % 32, warp_ = threadIdx.x / 32;
  const char* slots_;
  const float* scales_;
  int of_lane_, piece_;  // bytes
  int begin_;    // of the page, in the sequence
  bool is_edge_, is_new_;
  Queries<Q, Kind, kWidth> queries_;
  Scoring scoring_[2];
  float weights_[kTiles][4];
  float out_[Slot::kBoxes][kStepsOfBox][4];
};

// Puts together what the warps have found, page by page, and goes on through the chunks as long as
// they are of the same rows, if the first of them is among them. Sixteen threads have a row.
template <int kWidth>
class Merge {
  static constexpr int kRowThreads = 32 * kPageWarps / kUnitRows, kFours = kWidth / 4 / kRowThreads;

 public:
  __device__ Merge(const DecodeAttention& call, const Partials& partials)
      : call_(call), partials_(partials) {}

  __device__ void run(const Unit& unit, const Unit& next, int part, int parts,
                      const Found<kWidth>& found) {
    const int row = threadIdx.x / kRowThreads;
    const bool follows = chunks_ > 0;
    const bool goes_on = parts == 1 && (follows || unit.index == 0);
    chunks_ = goes_on ? chunks_ + 1 : 1;
    const bool last = !goes_on || !unit.goes_on_in(next);
    if (part * kUnitRows + row < unit.count * int(call_.group)) {
      Powers powers;
      float4 values[kFours];
      merge_pages(found, row, powers, values);
      if (follows) {
        const Powers::Factors factors = powers_.add(powers);
#pragma unroll
        for (int k = 0; k < kFours; ++k) values_[k] = of(factors, values_[k], values[k]);
      } else {
        powers_ = powers;
#pragma unroll
        for (int k = 0; k < kFours; ++k) values_[k] = values[k];
      }
      if (last) store(unit, part * kUnitRows + row);
    }
    if (last) chunks_ = 0;
  }

 private:
  __device__ static float4 of(const Powers::Factors& factors, const float4& a, const float4& b) {
    return {factors.of(a.x, b.x), factors.of(a.y, b.y), factors.of(a.z, b.z),
            factors.of(a.w, b.w)};
  }

  __device__ static void merge_pages(const Found<kWidth>& found, int row, Powers& powers,
                                     float4 (&values)[kFours]) {
    powers = {-INFINITY, 0};
#pragma unroll
    for (int page = 0; page < kPageWarps; ++page) {
      powers.largest = larger(powers.largest, found.powers[page][row].largest);
    }
    const float shift = shift_of_largest(powers.largest);
#pragma unroll
    for (float4& each : values) each = {};
#pragma unroll
    for (int page = 0; page < kPageWarps; ++page) {
      const Powers of_page = found.powers[page][row];
      const Powers::Factors factors = {1, fast_exp_of_negative(of_page.largest - shift)};
      powers.sum = factors.of(powers.sum, of_page.sum);
#pragma unroll
      for (int k = 0; k < kFours; ++k) values[k] = of(factors, values[k], at(found, page, row, k));
    }
  }
  __device__ static const float4& at(const Found<kWidth>& found, int page, int row, int k) {
    return *reinterpret_cast<const float4*>(found.values[page][row] + element(k));
  }
  __device__ static int element(int k) {
    return (k * kRowThreads + threadIdx.x % kRowThreads) * 4;
  }

  __device__ void store(const Unit& unit, int row) const {
    const int64_t padded = padded_width(call_.kv.width);
    float* const partial =
        partials_.at(unit.batch, call_.kv.heads, unit.head, unit.index - (chunks_ - 1), row);
#pragma unroll
    for (int k = 0; k < kFours; ++k) {
      if (element(k) < padded) *reinterpret_cast<float4*>(partial + element(k)) = values_[k];
    }
    if (threadIdx.x % kRowThreads == 0) powers_.store(partial + padded, chunks_);
  }

  const DecodeAttention& call_;
  const Partials& partials_;
  int chunks_ = 0;  // that it has put together
  Powers powers_;
  float4 values_[kFours];
};

// Shared memory: slots, then scales, then what is found.
template <class Kind, int kWidth>
__device__ __host__ constexpr int of_slot() {
  return kPageWarps * (Slot<Kind, kWidth>::kSize + Slot<Kind, kWidth>::kScales * 4);
}

template <class Q, class Kind, int kWidth>
__global__ void __launch_bounds__(kRingThreads)
    decode_mma_kernel(const __grid_constant__ DecodeAttention call,
                      const __grid_constant__ Partials partials,
                      const __grid_constant__ Boxes boxes) {
  using Reader = cuda::Reader<Kind, kWidth>;
  using Found = cuda::Found<kWidth>;
  extern __shared__ __align__(128) char shared_bytes[];
  __shared__ Ring ring;
  const unsigned place = unsigned(__cvta_generic_to_shared(shared_bytes));
  char* const slots = shared_bytes + (0u - place) % kSlotsAlignment;
  Found& found = *reinterpret_cast<Found*>(slots + boxes.slots * of_slot<Kind, kWidth>());
  if (threadIdx.x == 32 * kReadingWarp) Reader::begin(boxes, ring);
  if (threadIdx.x / 32 == kReadingWarp) {
    Reader reader(call, boxes, ring, slots);
    Units units = reader.find_first();
    __syncthreads();
    reader.run(units);
    return;
  }
  wait_for_previous();
  let_next_begin();
  __syncthreads();
  PageAttention<Q, Kind, kWidth> attention(call, ring, slots, boxes.slots, found);
  Merge<kWidth> merge(call, partials);
  attention.read_first();
  for (int i = 0; ring.unit(i).there; ++i) {
    const Unit& unit = ring.unit(i);
    const int parts = parts_of(call, unit);
    for (int part = 0; part < parts; ++part) {
      attention.run(i, part, parts);
      merge.run(unit, ring.unit(i + 1), part, parts, found);
    }
  }
}

template <class Kind, int kWidth>
int mma_shared_bytes(int slots) {
  return kSlotsAlignment + int(sizeof(Found<kWidth>)) + slots * of_slot<Kind, kWidth>();
}
// What a block gets of so much shared memory.
template <class Kind, int kWidth>
Boxes boxes_of(const PagedKv& kv, int shared_bytes) {
  using Slot = cuda::Slot<Kind, kWidth>;
  Boxes boxes;
  const int left = shared_bytes - int(sizeof(Ring)) - mma_shared_bytes<Kind, kWidth>(0);
  boxes.slots = ::min(left / of_slot<Kind, kWidth>(), kMostSlots);
  TensorOfBoxes tensor = {kv.keys, Slot::kBytes, {kv.width, kPageTokens, kv.heads, kv.pages},
                          {kv.of_token, kv.of_head, kv.of_page}, Slot::kRow, kSlotTokens};
  boxes.there = describe(boxes.keys, tensor);
  tensor.data = kv.values;
  boxes.there = boxes.there && describe(boxes.values, tensor);
  return boxes;
}

}  // namespace dsx::cuda
