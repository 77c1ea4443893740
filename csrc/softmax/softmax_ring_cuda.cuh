// softmax of long rows that pass through the ring of a cluster: of bfloat16, all of whose scores
// are only scaled.
#pragma once

#include "common/cuda/row_ring.cuh"
#include "softmax/softmax_cuda.cuh"

namespace dsx {
namespace {

// A block has up to kParts parts of a row. Their powers stay in registers if kHolds, else they are
// made again.
template <int kParts, bool kHolds, bool kByEngine>
__global__ void __launch_bounds__(cuda::kMostRingThreads, 1)
    ring_kernel(const __grid_constant__ Softmax softmax,
                const __grid_constant__ cuda::RingShape shape) {
  using T = BFloat16;
  using Floats = cuda::RowFloats;
  constexpr int kVectors = cuda::kVectorsOfPart;
  extern __shared__ __align__(128) uint4 ring_slots[];
  __shared__ cuda::RingMemory memory;
  const cuda::RowRing<T, 1> ring(shape, kParts, memory, ring_slots);
  ring.begin();
  if (ring.moves()) {
    return ring.move(softmax.rows, [&](int64_t row) {
      return cuda::RowOfEach<T, 1>{{softmax.x.row<T>(row)}};
    }, [&](int64_t row) { return kByEngine ? softmax.out.row<T>(row) : Pointer<T>{nullptr}; });
  }
  const int lane = int(threadIdx.x) % cuda::kWarp, warp = int(threadIdx.x) / cuda::kWarp;
  const int warps = ring.threads / cuda::kWarp;
  cuda::RingExchange exchange(ring);
  const Floats scale = softmax.scores.scale;
#pragma unroll 1
  for (auto place = ring.first(); place.row < softmax.rows; ring.advance(place, ring.parts)) {
    Floats held[kHolds ? kParts : 1][kVectors];
    float largest[kHolds ? kParts : 1][kVectors];
    auto there = place;
    const auto for_each_vector = [&](int p, const auto& body) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int i = (v * ring.threads + int(threadIdx.x)) * cuda::kRowVector;
        if (i < ring.count(p)) body(v, i, floats_of(ring.vector(there.slot, 0, i)) * scale);
      }
    };
    const auto add = [&](int p) {
      ring.wait(there);
      cuda::RowPowers powers;
      for_each_vector(p, [&](int v, int, const Floats& scores) {
        const Floats power = powers.add(scores);
        if constexpr (kHolds) {
          held[p][v] = power;
          largest[p][v] = powers.largest;
        }
      });
      powers.add_over_lanes(cuda::kWarp / 2);
      float* const of_warps = exchange.of_warps(p);
      if (lane == 0) {
        of_warps[2 * warp] = powers.largest;
        of_warps[2 * warp + 1] = powers.sum;
      }
      ring.advance(there, 1);
    };
    if constexpr (kHolds) {
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        if (p < ring.parts) add(p);
      }
    } else {
#pragma unroll 1
      for (int p = 0; p < ring.parts; ++p) add(p);
    }
    ring.barrier();
    for (int p = warp; p < ring.parts; p += warps) {
      const float* const of_warps = exchange.of_warps(p);
      cuda::RowPowers powers;
      if (lane < warps) powers = {of_warps[2 * lane], of_warps[2 * lane + 1]};
      powers.add_over_lanes(cuda::kWarp / 2);
      exchange.template tell<2>(p, lane % 2 == 0 ? powers.largest : powers.sum);
    }
    const auto of_parts = exchange.template gather<2>();
    cuda::RowPowers all{of_parts[0][0], of_parts[0][1]};
    for (int q = 1; q < shape.parts; ++q) all.add({of_parts[q][0], of_parts[q][1]});
    const float inverse = inverse_of(cuda::Floats<1>(all.sum)).lanes[0];
    const bool is_finite = inverse >= 0;  // otherwise a score is NaN or inf

    there = place;
    const Pointer<T> out = softmax.out.row<T>(place.row);
    const auto put = [&](int p, int i, const Floats& result) {
      const auto packed = cuda::packed_for(out, result);
      if constexpr (kByEngine) {
        ring.set(there.slot, i, packed);
      } else {
        cuda::put_vector<cuda::Stored::streamed>(out, ring.column(p) + i, packed);
      }
    };
    const auto put_power = [&](int p, int i, const Floats& power, float relative_to) {
      put(p, i, power * Floats(cuda::RowPowers::factor(relative_to, all.largest) * inverse));
    };
    const auto put_again = [&](int p) {
      cuda::RowPowers again;
      for_each_vector(p, [&](int, int i, const Floats& scores) {
        if (is_finite) {
          const Floats power = again.add(scores);
          put_power(p, i, power, again.largest);
        } else {
          put(p, i, select(scores == Floats(-INFINITY), Floats(0.0f), Floats(inverse)));
        }
      });
    };
    if (kHolds && is_finite) {
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        if (p >= ring.parts) continue;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          const int i = (v * ring.threads + int(threadIdx.x)) * cuda::kRowVector;
          if (i < ring.count(p)) put_power(p, i, held[p][v], largest[p][v]);
        }
        ring.finish(there);
        ring.advance(there, 1);
      }
    } else {
#pragma unroll 1
      for (int p = 0; p < ring.parts; ++p) {
        put_again(p);
        ring.finish(there);
        ring.advance(there, 1);
      }
    }
  }
}

template <int kParts, bool kHolds, bool kByEngine>
bool run_ring(const Softmax& softmax, cudaStream_t queue) {
  constexpr const char* op = "softmax";
  const auto kernel = ring_kernel<kParts, kHolds, kByEngine>;
  const auto ring = cuda::ring_of<BFloat16, 1>(kernel, kParts, softmax.rows, softmax.length, op);
  if (!ring) return false;
  cuda::launch_kernel(kernel, ring->launch, queue, op, softmax, ring->shape);
  return true;
}

}  // namespace
}  // namespace dsx
