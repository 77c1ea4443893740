// softmax of long rows of bfloat16 that pass through a ring: of scores that are only scaled.
#pragma once

#include "common/cuda/row_ring.cuh"
#include "softmax/softmax_cuda.cuh"

namespace dsx {
namespace {

// What a thread holds of a row: powers, and what each vector's are relative to.
struct HeldPowers {
  RowFloats powers[cuda::kVectorsOfPart];
  float largest[cuda::kVectorsOfPart];
};

// The powers of two rows are held: those of the next one are made before the sum of a row is there.
__global__ void __launch_bounds__(cuda::kMostRingThreads, 1)
    ring_kernel(const __grid_constant__ Softmax softmax,
                const __grid_constant__ cuda::RingShape shape) {
  using T = cuda::RowRing::T;
  using cuda::RowPowers;
  extern __shared__ __align__(128) uint4 ring_slots[];
  __shared__ cuda::RingMemory memory;
  const cuda::RowRing ring(shape, memory, ring_slots);
  ring.begin();
  const int lane = int(threadIdx.x) % cuda::kWarp, warp = int(threadIdx.x) / cuda::kWarp;
  if (ring.helps()) {
    return ring.help<2>({&softmax.x}, softmax.out, [&](const auto& of_warps) {
      RowPowers powers;
      if (lane < ring.threads / cuda::kWarp) powers = {of_warps[lane][0], of_warps[lane][1]};
      powers.add_over_lanes(cuda::kWarp / 2);
      return lane % 2 == 0 ? powers.largest : powers.sum;
    }, [&](const auto& of_parts) {
      RowPowers all;
      for (int part = 0; part < shape.blocks; ++part) {
        all.add({of_parts[part][0], of_parts[part][1]});
      }
      const RowTotals totals(all);
      return lane % 2 == 0 ? totals.largest : totals.inverse;
    });
  }
  const RowFloats scale = softmax.scores.scale;
  using Place = cuda::RowRing::Place;
  const auto score = [&](const Place& at, int i) { return floats_of(ring.vector(at, i)) * scale; };
  // Row number k of the cluster.
  const auto put = [&](const Place& place, unsigned k, HeldPowers& held) {
    if (place.row >= softmax.rows) return;
    ring.wait(place);
    RowPowers powers;
    ring.for_each_vector([&](int v, int i) {
      held.powers[v] = powers.add(score(place, i));
      held.largest[v] = powers.largest;
    });
    powers.add_over_lanes(cuda::kWarp / 2);
    float (&mine)[2] = memory.of_warps[cuda::RingMemory::usual(k).buffer][warp];
    if (lane == 0) {
      mine[0] = powers.largest;
      mine[1] = powers.sum;
    }
    ring.show_sums(k);
  };
  const auto take = [&](const Place& place, unsigned k, const HeldPowers& held) {
    if (place.row >= softmax.rows) return;
    const float* const of_row = ring.wait_for_totals(k);
    const RowTotals totals(of_row[0], of_row[1]);
    const Pointer<T> out = softmax.out.row<T>(place.row);
    if (totals.are_finite()) {
      ring.for_each_vector([&](int v, int i) {
        const RowFloats result = totals.result(held.powers[v], held.largest[v]);
        ring.set(place, i, cuda::packed_for(out, result));
      });
    } else {
      ring.for_each_vector([&](int, int i) {
        ring.set(place, i, cuda::packed_for(out, totals.result(score(place, i))));
      });
    }
    ring.finish(place);
  };
  HeldPowers held[2];
  Place place = ring.first();
  put(place, 0, held[0]);
#pragma unroll 1
  for (unsigned k = 0; place.row < softmax.rows; k += 2) {
#pragma unroll
    for (int turn = 0; turn < 2; ++turn) {
      Place next = place;
      ring.advance(next);
      put(next, k + turn + 1, held[1 - turn]);
      take(place, k + turn, held[turn]);
      place = next;
    }
  }
}

// The same rows with the same bits where no whole vectors can be read: one block of so many threads
// as have a part takes one part after the other.
__global__ void __launch_bounds__(cuda::kPartThreads)
    reading_kernel(const __grid_constant__ Softmax softmax, bool aligned) {
  using cuda::RowPowers;
  using Team = cuda::LoopingTeam<cuda::RowLength::is_long, cuda::kVectorsOfPart>;
  static_assert(Team::kIterationsOfPart == 1);
  const Pointer<Any> out = softmax.out.row<Any>(blockIdx.x);
  const cuda::TwiceRead<Team, Any, 1> reader{
      {softmax.x.row<Any>(blockIdx.x)}, 0, softmax.length, softmax.length, aligned};
  const auto score = [&](const RowFloats& x, int count) {
    RowFloats found = x * RowFloats(softmax.scores.scale);
#pragma unroll
    for (int k = 0; k < kRowVector; ++k) found.lanes[k] = k < count ? found.lanes[k] : -INFINITY;
    return found;
  };
  RowPowers all, powers;
  reader.read_parts<cuda::Kept::yes>([&](int, int64_t, int count, const RowFloats(&x)[1], bool) {
    powers.add(score(x[0], count));
  }, [&] {
    powers.add_over_team<Team>();
    all.add(powers);
    powers = {};
    __syncthreads();  // before the memory that they were added up in is written again
  });
  const RowTotals totals(all);
  reader.read_again([&](int v, int64_t i, int count, const RowFloats(&x)[1], bool) {
    if (v == 0) powers = {};  // of another part
    const RowFloats scores = score(x[0], count), power = powers.add(scores);
    cuda::put<cuda::Stored::streamed>(
        out, i, count, aligned,
        totals.are_finite() ? totals.result(power, powers.largest) : totals.result(scores));
  });
}

// Whether these rows, whose scores are only scaled, are long ones whose sums are those of parts: by
// their dtypes and their length, not by where they lie, so that a row has the same bits anywhere.
inline bool run_in_parts(const Softmax& softmax, bool whole, cudaStream_t queue) {
  constexpr const char* op = "softmax";
  const Scores& scores = softmax.scores;
  const bool sees_all = scores.before < 0 && scores.after < 0;
  const bool fits = softmax.x.dtype == Dtype::bfloat16 && softmax.out.dtype == Dtype::bfloat16;
  if (!sees_all || !fits) return false;
  const auto ring = cuda::ring_of(ring_kernel, softmax.rows, softmax.length, op);
  if (!ring) return false;
  if (whole) {
    cuda::launch_kernel(ring_kernel, ring->launch, queue, op, softmax, ring->shape);
  } else {
    reading_kernel<<<unsigned(softmax.rows), unsigned(ring->shape.part / cuda::kPartOfThread), 0,
                     queue>>>(softmax, cuda::all_aligned({softmax.x, softmax.out}));
  }
  cuda::check(cudaGetLastError(), op);
  return true;
}

}  // namespace
}  // namespace dsx
