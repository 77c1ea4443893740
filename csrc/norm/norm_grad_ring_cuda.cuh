// The gradients of a norm of long rows that pass through a ring: x and the gradient of the result
// come into a slot, and the gradient of x leaves from where x was. The threads of a block always
// have the same columns: what all rows of a cluster add to the gradients of vectors stays in their
// registers.
#pragma once

#include "common/cuda/registers.cuh"
#include "norm/norm_ring_cuda.cuh"

namespace dsx::cuda {

using GradRing = RowRingOf<2>;

// kMostRingThreads begin with 96 registers each, which is all that a multiprocessor has for them.
constexpr int kRegistersThatHelp = 32, kRegistersThatCompute = 112;
static_assert(kHelpers * (96 - kRegistersThatHelp) >= kPartThreads * (kRegistersThatCompute - 96));

// The weight of a thread's columns: in registers where they have room for it, else in shared memory
// that no other thread looks at.
template <bool kInRegisters>
struct GradWeight {
  using Vector = RowVector<BFloat16>;
  Vector held[kInRegisters ? kVectorsOfPart : 1];

  __device__ void fetch_all(const GradRing& ring, const NormBackward& norm) {
    ring.for_each_vector([&](int v, int i) {
      constexpr uint32_t kOnes = 0x3f803f80;
      Vector found{{{kOnes, kOnes, kOnes, kOnes}}};
      if (norm.weight.is_present()) {
        found = fetch(norm.weight.even_row<BFloat16>(0), ring.column + i, kRowVector, true);
      }
      if constexpr (kInRegisters) {
        held[v] = found;
      } else {
        *far(ring, i) = found.words[0];
      }
    });
  }
  __device__ Vector at(const GradRing& ring, int v, int i) {
    if constexpr (kInRegisters) {
      uint4& w = held[v].words[0];  // the compiler would hold them as floats
      asm volatile("" : "+r"(w.x), "+r"(w.y), "+r"(w.z), "+r"(w.w));
      return held[v];
    } else {
      return {{*far(ring, i)}};
    }
  }

 private:
  __device__ static uint4* far(const GradRing& ring, int i) {
    return reinterpret_cast<uint4*>(ring.behind_slots() + i);
  }
};

// What a block has of a row, with the weight as the third of its vectors.
template <class Weight>
struct GradRow {
  const GradRing& ring;
  GradRing::Place place;
  Weight& weight;

  template <class Body>
  __device__ void for_each_vector(const Body& body) const {
    for_each([&](int, int i, const auto& vectors) { body(i, kRowVector, vectors); });
  }
  // With the number of the vector.
  template <class Body>
  __device__ void for_each(const Body& body) const {
    ring.for_each_vector([&](int v, int i) {
      const RowVector<BFloat16> vectors[3] = {ring.vector(place, i, 0), ring.vector(place, i, 1),
                                              weight.at(ring, v, i)};
      body(v, i, vectors);
    });
  }
};

template <class Kind>
__global__ void __launch_bounds__(kMostRingThreads, 1)
    grad_ring_kernel(const __grid_constant__ NormBackward norm, float inverse_n,
                     const __grid_constant__ RingShape shape,
                     OfVectors<float*> partials) {  // [clusters, length] written; null: not wanted
  using T = BFloat16;
  extern __shared__ __align__(128) uint4 grad_slots[];
  __shared__ GradRing::Memory memory;
  const GradRing ring(shape, memory, grad_slots);
  ring.begin();
  let_next_begin();
  __syncwarp();  // as the warps of a group change their registers together
  if (ring.helps()) {
    give_registers<kRegistersThatHelp>();
    constexpr int kSums = 2 * (1 + Kind::kCentered);
    return RingReduction<GradRing, kSums>::help(ring, {&norm.x, &norm.grad_out}, norm.grad_x);
  }
  take_registers<kRegistersThatCompute>();
  if (!ring.computes()) return;
  using Weight = GradWeight<!Kind::kCentered>;
  Weight weight;
  weight.fetch_all(ring, norm);
  const float offset = norm.weight.is_present() ? norm.weight_offset : 0.0f;
  const auto weight_at = [&](const auto& vectors) {
    return with_offset(floats_of(vectors[2]), offset);
  };
  const auto weighted = [&](int, const auto& vectors) {
    return floats_of(vectors[1]) * weight_at(vectors);
  };
  RowFloats of_weight[kVectorsOfPart], of_bias[kVectorsOfPart];
#pragma unroll
  for (int v = 0; v < kVectorsOfPart; ++v) of_weight[v] = of_bias[v] = RowFloats(0.0f);
  using Place = GradRing::Place;
  const auto row_at = [&](const Place& place) { return GradRow<Weight>{ring, place, weight}; };
  for_each_row<Kind, true>(ring, inverse_n, norm.eps, row_at, weighted,
                           [&](const Place& place, const RowMoments<Kind>& found) {
    const Pointer<T> grad_x = norm.grad_x.even_row<T>(place.row);
    row_at(place).for_each([&](int v, int i, const auto& vectors) {
      const RowFloats value = found.standardized_of(floats_of(vectors[0]));
      const RowFloats grad = floats_of(vectors[1]);
      const RowFloats result = found.gradient(value, grad, weight_at(vectors));
      ring.set(place, i, packed_for(grad_x, result));
      of_weight[v] = add_grad_of_weight(value, grad, of_weight[v]);
      if constexpr (Kind::kCentered) of_bias[v] = of_bias[v] + grad;
    });
  });
  const int64_t cluster = blockIdx.x / unsigned(shape.blocks);
  const auto put_sums = [&](const RowFloats(&sums)[kVectorsOfPart], float* of_all) {
    if (of_all == nullptr) return;
    float* const target = of_all + cluster * norm.length + ring.column;
    ring.for_each_vector([&](int v, int i) {
      store<Access::vector>(Pointer<float>{target + i}, sums[v], kRowVector);
    });
  };
  put_sums(of_weight, partials.weight);
  if constexpr (Kind::kCentered) put_sums(of_bias, partials.bias);
}

// As ring_of. None where something else than x and the gradient of the result comes in, or where
// the weight would not fit beside it.
template <class Kind>
std::optional<RingLaunch> grad_ring_of(const NormBackward& norm) {
  const bool is_even = !norm.weight.is_present() || norm.weight.dtype == Dtype::bfloat16;
  if (!is_even || norm.grad_sum.is_present()) return {};
  return ring_of<GradRing>(grad_ring_kernel<Kind>, norm.rows, norm.length, Kind::kBackwardOp,
                           Kind::kCentered);
}

}  // namespace dsx::cuda
