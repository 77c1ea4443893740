// decode_attention on CUDA by tensor cores, for keys and values that can be read 16 bytes at a
// time. A block takes a chunk, each of its warps a page of it, and 8 rows of a head; another warp
// reads the pages, ahead of them.
#pragma once

#include "common/cuda/device.cuh"
#include "attention/decode/decode_page_cuda.cuh"

namespace dsx::cuda {

// What a row has found in a chunk, or in several: sixteen threads have it.
template <int kWidth>
struct RowOfChunks {
  static constexpr int kThreads = 32 * kPageWarps / kTileRows, kFours = kWidth / 4 / kThreads;
  Powers powers;
  float4 values[kFours];

  __device__ static int row() { return threadIdx.x / kThreads; }
  __device__ static bool is_first_thread() { return threadIdx.x % kThreads == 0; }
  __device__ static int element(int k) { return (k * kThreads + threadIdx.x % kThreads) * 4; }

  // Puts together what the warps have found, page by page.
  __device__ void merge_pages(const Found<kWidth>& found) {
    powers = {-INFINITY, 0};
#pragma unroll
    for (int page = 0; page < kPageWarps; ++page) {
      powers.largest = larger(powers.largest, found.powers[page][row()].largest);
    }
    const float shift = shift_of_largest(powers.largest);
#pragma unroll
    for (float4& each : values) each = {};
#pragma unroll
    for (int page = 0; page < kPageWarps; ++page) {
      const Powers of_page = found.powers[page][row()];
      const Powers::Factors factors = {1, fast_exp_of_negative(of_page.largest - shift)};
      powers.sum = factors.of(powers.sum, of_page.sum);
      add(factors, [&](int k) {
        return *reinterpret_cast<const float4*>(found.values[page][row()] + element(k));
      });
    }
  }
  // Those of later keys.
  __device__ void add(const RowOfChunks& later) {
    add(powers.add(later.powers), [&](int k) { return later.values[k]; });
  }

 private:
  template <class Others>
  __device__ void add(const Powers::Factors& factors, const Others& others) {
#pragma unroll
    for (int k = 0; k < kFours; ++k) {
      const float4 a = values[k], b = others(k);
      values[k] = {factors.of(a.x, b.x), factors.of(a.y, b.y), factors.of(a.z, b.z),
                   factors.of(a.w, b.w)};
    }
  }
};

// Puts together what the warps have found, and goes on through the chunks as long as they are of
// the same rows, if the first of them is among them.
template <int kWidth>
class Merge {
  using Row = RowOfChunks<kWidth>;

 public:
  __device__ Merge(const DecodeAttention& call, const Partials& partials)
      : call_(call), partials_(partials) {}

  __device__ void run(const Task& task, const Task& next, int row_tile, int row_tiles,
                      const Found<kWidth>& found) {
    const int row = row_tile * kTileRows + Row::row();
    const bool follows = chunks_ > 0;
    const bool goes_on = row_tiles == 1 && (follows || task.index == 0);
    chunks_ = goes_on ? chunks_ + 1 : 1;
    const bool last = !goes_on || !task.goes_on_in(next);
    if (row < task.count * int(call_.group)) {
      Row of_chunk;
      of_chunk.merge_pages(found);
      if (follows) {
        row_.add(of_chunk);
      } else {
        row_ = of_chunk;
      }
      if (last) store(task, row);
    }
    if (last) chunks_ = 0;
  }

 private:
  __device__ void store(const Task& task, int row) const {
    const int64_t padded = padded_width(call_.kv.width);
    float* const partial =
        partials_.at(task.batch, call_.kv.heads, task.head, task.index - (chunks_ - 1), row);
#pragma unroll
    for (int k = 0; k < Row::kFours; ++k) {
      const int element = Row::element(k);
      if (element < padded) *reinterpret_cast<float4*>(partial + element) = row_.values[k];
    }
    if (Row::is_first_thread()) row_.powers.store(partial + padded, chunks_);
  }

  const DecodeAttention& call_;
  const Partials& partials_;
  int chunks_ = 0;  // that it has put together
  Row row_;
};

// Shared memory: stages, then their scales, then what is found.
template <class Kind, int kWidth>
__device__ __host__ constexpr int bytes_of_stage() {
  return kPageWarps * (StageLayout<Kind, kWidth>::kSize + StageLayout<Kind, kWidth>::kScales * 4);
}

template <class Q, class Kind, int kWidth>
__global__ void __launch_bounds__(kPipelineThreads)
    decode_mma_kernel(const __grid_constant__ DecodeAttention call,
                      const __grid_constant__ Partials partials,
                      const __grid_constant__ TmaTiles tiles) {
  using Reader = cuda::Reader<Kind, kWidth, false>;
  using Found = cuda::Found<kWidth>;
  extern __shared__ __align__(128) char shared_bytes[];
  __shared__ Pipeline pipeline;
  const unsigned place = unsigned(__cvta_generic_to_shared(shared_bytes));
  char* const memory = shared_bytes + (0u - place) % kTmaTileAlignment;
  Found& found = *reinterpret_cast<Found*>(memory + tiles.stages * bytes_of_stage<Kind, kWidth>());
  if (threadIdx.x == 32 * kReadingWarp) Reader::begin(tiles, pipeline);
  __syncthreads();
  if (threadIdx.x / 32 == kReadingWarp) {
    Reader reader(call, tiles, pipeline, memory);
    Tasks tasks = reader.template find_first<Tasks>();
    reader.show_first();
    reader.run(tasks);
    return;
  }
  const int warp = int(threadIdx.x) / 32;
  wait_for_previous();
  let_next_begin();
  wait_for(&pipeline.begun[warp], 0);
  PageAttention<Q, Kind, kWidth, false> attention(call, pipeline, memory, tiles.stages, found,
                                                  nullptr);
  Merge<kWidth> merge(call, partials);
  attention.read_first();
  for (int i = 0; pipeline.task(warp, i).there; ++i) {
    const Task& task = pipeline.task(warp, i);
    const int row_tiles = row_tiles_of(call, task);
    for (int row_tile = 0; row_tile < row_tiles; ++row_tile) {
      attention.run(i, row_tile, row_tiles);
      merge.run(task, pipeline.task(warp, i + 1), row_tile, row_tiles, found);
    }
  }
}

template <class Kind, int kWidth>
int mma_shared_bytes(int stages) {
  return kTmaTileAlignment + int(sizeof(Found<kWidth>)) + stages * bytes_of_stage<Kind, kWidth>();
}
// What a block takes beside that, whatever its launch says.
template <class... Parameters>
int static_shared_bytes(void (*kernel)(Parameters...), const char* op) {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, kernel), op);
  return int(attributes.sharedSizeBytes);
}
constexpr int kEnough = 4;  // stages, for memory to be busy
// How many stages there is memory for if a block takes so many bytes besides, alone on a processor
// or, if that leaves enough of them, beside another one.
template <class Kind, int kWidth>
int stages_in(const Device& device, bool beside, int besides) {
  const auto stages = [&](int bytes) {
    const int left = bytes - besides - mma_shared_bytes<Kind, kWidth>(0);
    return std::min(left / bytes_of_stage<Kind, kWidth>(), kMostStages);
  };
  const int of_two = stages(
      std::min(device.shared_of_processor / 2 - device.shared_reserved, device.shared_of_block));
  return beside && of_two >= kEnough ? of_two : stages(device.shared_of_block);
}
template <class Kind, int kWidth>
TmaTiles tma_tiles_of(const PagedKv& kv, int stages) {
  using Layout = cuda::StageLayout<Kind, kWidth>;
  TmaTiles tiles;
  tiles.stages = stages;
  const auto make = [&](CUtensorMap& map, const void* data) {
    return make_map(map, kv, data, Layout::kBytes, Layout::kRow, kStageTokens);
  };
  tiles.there = make(tiles.keys, kv.keys) && make(tiles.values, kv.values);
  return tiles;
}

// Whether all of keys, values and scales can be read 16 bytes at a time.
template <class Kind>
bool are_aligned(const PagedKv& kv) {
  const uint64_t bytes = Kind::kQuantized ? 1 : uint64_t(bytes_of(kv.dtype));
  uint64_t all = uint64_t(kv.of_page | kv.of_head | kv.of_token | kv.width) * bytes;
  for (const void* data :
       {static_cast<const void*>(kv.keys), static_cast<const void*>(kv.values),
        static_cast<const void*>(kv.key_scales), static_cast<const void*>(kv.value_scales)}) {
    all |= reinterpret_cast<uintptr_t>(data);
  }
  return all % 16 == 0;
}

// Calls body with the type of queries and the width that the code is for, and returns what it does;
// false if tensor cores cannot take the call.
template <class Kind, class Body>
bool with_mma(const DecodeAttention& call, const Body& body) {
  if (!Kind::kQuantized && call.q.dtype != call.kv.dtype) return false;
  if (!are_aligned<Kind>(call.kv)) return false;
  const auto with_width = [&](auto q) {
    if (call.kv.width <= 64) return body(q, std::integral_constant<int, 64>{});
    if (call.kv.width <= 128) return body(q, std::integral_constant<int, 128>{});
    return body(q, std::integral_constant<int, 256>{});
  };
  switch (call.q.dtype) {
    case Dtype::bfloat16: return with_width(BFloat16{});
    case Dtype::float16: return with_width(Half{});
    case Dtype::float32: return false;
  }
  return false;
}

constexpr int64_t kMuch = 16;  // tasks of a processor

}  // namespace dsx::cuda
