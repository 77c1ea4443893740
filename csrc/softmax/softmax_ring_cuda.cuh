// softmax of long rows that pass through the ring of a cluster: of bfloat16, all of whose scores
// are only scaled.
#pragma once

#include "common/cuda/row_ring.cuh"
#include "softmax/softmax_cuda.cuh"

namespace dsx {
namespace {

// What a thread holds of a row: powers, and what each vector's are relative to.
template <int kParts>
struct HeldPowers {
  cuda::RowFloats powers[kParts][cuda::kVectorsOfPart];
  float largest[kParts][cuda::kVectorsOfPart];
};

// A block has up to kParts parts of a row. Powers of kAhead + 1 rows stay in registers.
template <int kParts, int kAhead>
__global__ void __launch_bounds__(cuda::kMostRingThreads, 1)
    ring_kernel(const __grid_constant__ Softmax softmax,
                const __grid_constant__ cuda::RingShape shape) {
  using T = BFloat16;
  using Floats = cuda::RowFloats;
  using cuda::RowPowers;
  constexpr int kVectors = cuda::kVectorsOfPart;
  extern __shared__ __align__(128) uint4 ring_slots[];
  __shared__ cuda::RingMemory memory;
  const cuda::RowRing<T, 1> ring(shape, kParts, memory, ring_slots);
  using Place = typename cuda::RowRing<T, 1>::Place;
  ring.begin();
  if (ring.moves()) {
    return ring.move(softmax.rows, [&](int64_t row) {
      return cuda::RowOfEach<T, 1>{{softmax.x.row<T>(row)}};
    }, [&](int64_t row) { return softmax.out.row<T>(row); });
  }
  const int lane = int(threadIdx.x) % cuda::kWarp, warp = int(threadIdx.x) / cuda::kWarp;
  if (ring.helps()) {
    return cuda::tell_all<2>(ring, softmax.rows, [&](const float* of_warps) {
      RowPowers powers;
      if (lane < ring.threads / cuda::kWarp) powers = {of_warps[2 * lane], of_warps[2 * lane + 1]};
      powers.add_over_lanes(cuda::kWarp / 2);
      return lane % 2 == 0 ? powers.largest : powers.sum;
    }, [&](const auto& of_parts) {
      RowPowers all{of_parts[0][0], of_parts[0][1]};
      for (int q = 1; q < shape.parts; ++q) all.add({of_parts[q][0], of_parts[q][1]});
      return lane % 2 == 0 ? all.largest : inverse_of(cuda::Floats<1>(all.sum)).lanes[0];
    });
  }
  const Floats scale = softmax.scores.scale;
  cuda::UsualTurn to_put, to_take;
  // Calls body(v, i) for each vector of a part.
  const auto for_each = [&](int p, const auto& body) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int i = (v * ring.threads + int(threadIdx.x)) * cuda::kRowVector;
      if (i < ring.count(p)) body(v, i);
    }
  };
  const auto scores = [&](const Place& there, int i) {
    return floats_of(ring.vector(there.slot, 0, i)) * scale;
  };
  const auto add = [&](const Place& place, HeldPowers<kParts>& held) {
    Place there = place;
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      if (p >= ring.parts) continue;
      ring.wait(there);
      RowPowers powers;
      for_each(p, [&](int v, int i) {
        held.powers[p][v] = powers.add(scores(there, i));
        held.largest[p][v] = powers.largest;
      });
      powers.add_over_lanes(cuda::kWarp / 2);
      float* const of_warps = memory.of_warps[to_put.buffer][p];
      if (lane == 0) {
        of_warps[2 * warp] = powers.largest;
        of_warps[2 * warp + 1] = powers.sum;
      }
      ring.advance(there, 1);
    }
    cuda::show_sums(ring, to_put.buffer);
    to_put.advance();
  };
  const auto put = [&](const Place& place, const HeldPowers<kParts>& held) {
    const float* const totals = cuda::wait_for_totals(ring, to_take);
    const float largest = totals[0], inverse = totals[1];
    to_take.advance();
    const bool is_finite = inverse >= 0;  // otherwise a score is NaN or inf
    const Pointer<T> out = softmax.out.row<T>(place.row);
    Place there = place;
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      if (p >= ring.parts) continue;
      if (is_finite) {
        for_each(p, [&](int v, int i) {
          const float factor = RowPowers::factor(held.largest[p][v], largest) * inverse;
          ring.set(there.slot, i, cuda::packed_for(out, held.powers[p][v] * Floats(factor)));
        });
      } else {
        for_each(p, [&](int, int i) {
          const Floats result =
              select(scores(there, i) == Floats(-INFINITY), Floats(0.0f), Floats(inverse));
          ring.set(there.slot, i, cuda::packed_for(out, result));
        });
      }
      ring.finish(there);
      ring.advance(there, 1);
    }
  };

  HeldPowers<kParts> held[kAhead + 1];
  Place place = ring.first(), next = place;
  const auto add_next = [&](HeldPowers<kParts>& to) {
    if (next.row >= softmax.rows) return;
    add(next, to);
    ring.advance(next, ring.parts);
  };
  if constexpr (kAhead > 0) add_next(held[0]);
#pragma unroll 1
  while (place.row < softmax.rows) {
#pragma unroll
    for (int turn = 0; turn <= kAhead; ++turn) {
      add_next(held[(turn + kAhead) % (kAhead + 1)]);
      if (place.row >= softmax.rows) continue;
      put(place, held[turn]);
      ring.advance(place, ring.parts);
    }
  }
}

template <int kParts, int kAhead>
bool run_ring(const Softmax& softmax, cudaStream_t queue) {
  static_assert(kAhead <= 1);
  constexpr const char* op = "softmax";
  const auto kernel = ring_kernel<kParts, kAhead>;
  const auto ring =
      cuda::ring_of<BFloat16, 1>(kernel, kParts, kAhead, softmax.rows, softmax.length, op);
  if (!ring || ring->shape.ahead != kAhead) return false;
  cuda::launch_kernel(kernel, ring->launch, queue, op, softmax, ring->shape);
  return true;
}

}  // namespace
}  // namespace dsx
