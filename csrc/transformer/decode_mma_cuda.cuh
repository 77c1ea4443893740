// decode_attention on CUDA by tensor cores, for keys and values that can be read 16 bytes at a
// time. A block takes a chunk, each of its warps a page of it, and 8 rows of a head; another warp
// reads the pages, ahead of them.
#pragma once

#include "common/cuda/device.cuh"
#include "transformer/decode_page_cuda.cuh"

namespace dsx::cuda {

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
    return {factors.of(a.x, b.x), factors.of(a.y, b.y), factors.of(a.z, b.z), factors.of(a.w, b.w)};
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
  __device__ static int element(int k) { return (k * kRowThreads + threadIdx.x % kRowThreads) * 4; }

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
  char* const slots = shared_bytes + (0u - place) % kBoxAlignment;
  Found& found = *reinterpret_cast<Found*>(slots + boxes.slots * of_slot<Kind, kWidth>());
  if (threadIdx.x == 32 * kReadingWarp) Reader::begin(boxes, ring);
  __syncthreads();
  if (threadIdx.x / 32 == kReadingWarp) {
    Reader reader(call, boxes, ring, slots);
    Units units = reader.find_first();
    reader.run(units);
    return;
  }
  const int warp = int(threadIdx.x) / 32;
  wait_for_previous();
  let_next_begin();
  wait_for(&ring.begun[warp], 0);
  PageAttention<Q, Kind, kWidth> attention(call, ring, slots, boxes.slots, found);
  Merge<kWidth> merge(call, partials);
  attention.read_first();
  for (int i = 0; ring.unit(warp, i).there; ++i) {
    const Unit& unit = ring.unit(warp, i);
    const int parts = parts_of(call, unit);
    for (int part = 0; part < parts; ++part) {
      attention.run(i, part, parts);
      merge.run(unit, ring.unit(warp, i + 1), part, parts, found);
    }
  }
}

template <class Kind, int kWidth>
int mma_shared_bytes(int slots) {
  return kBoxAlignment + int(sizeof(Found<kWidth>)) + slots * of_slot<Kind, kWidth>();
}
// One block on a processor, or two where there is much to do and enough memory for both.
template <class Kind, int kWidth>
int slots_in(const Device& device, int64_t units_of_processor) {
  constexpr int kMuch = 16, kEnough = 4;
  const auto slots = [](int bytes) {
    const int left = bytes - int(sizeof(Ring)) - mma_shared_bytes<Kind, kWidth>(0);
    return std::min(left / of_slot<Kind, kWidth>(), kMostSlots);
  };
  const int of_two = slots(
      std::min(device.shared_of_processor / 2 - device.shared_reserved, device.shared_of_block));
  return units_of_processor >= kMuch && of_two >= kEnough ? of_two : slots(device.shared_of_block);
}
template <class Kind, int kWidth>
Boxes boxes_of(const PagedKv& kv, const Device& device, int64_t units_of_processor) {
  using Slot = cuda::Slot<Kind, kWidth>;
  Boxes boxes;
  boxes.slots = slots_in<Kind, kWidth>(device, units_of_processor);
  const auto make = [&](CUtensorMap& map, const void* data) {
    return make_map(map, kv, data, Slot::kBytes, Slot::kRow, kSlotTokens);
  };
  boxes.there = make(boxes.keys, kv.keys) && make(boxes.values, kv.values);
  return boxes;
}

}  // namespace dsx::cuda
