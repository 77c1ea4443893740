// quantize and dequantize on CUDA. A team of neighbouring threads has a group in its registers, and
// so reads it once; of groups that do not fit, or lie in several rows or not by eights, the largest
// are found first.
#include "quantization/quantize_cuda.cuh"

namespace dsx {
namespace {

using namespace cuda;

constexpr const char* kOp = "quantize";
constexpr const char* kDequantize = "dequantize";
constexpr int kRuns = 2;                // of a thread: their loads are under way together
constexpr int64_t kMostThreads = 1024;  // of a team
constexpr int64_t kMostOfTeam = kMostThreads * kRuns * kRun;

// Over a team of so many threads, a power of two; all of the block take part, once.
__device__ inline Largest largest_of_team(Largest found, int log2_threads, bool asymmetric) {
  const int threads = 1 << log2_threads;
  found = largest_of_lanes(found, threads < kWarp ? threads : kWarp, asymmetric);
  if (threads <= kWarp) return found;
  __shared__ Largest of_warps[kMostThreads / kWarp];
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = found;
  __syncthreads();
  const int first_warp = int(threadIdx.x) >> log2_threads << (log2_threads - 5);
#pragma unroll 1
  for (int w = 0; w < threads / kWarp; ++w) found = larger(found, of_warps[first_warp + w]);
  return found;
}

// A team takes a group. With one row there is no division.
template <class T, bool kOneRow, class Coding>
__global__ void __launch_bounds__(kMostThreads)
    groups_kernel(const __grid_constant__ Quantize call, const Coding coding, int64_t columns,
                  int log2_threads) {
  const int threads = 1 << log2_threads;  // of a team
  const int rank = int(threadIdx.x) & (threads - 1);
  const int64_t group =
      int64_t(blockIdx.x) * (blockDim.x >> log2_threads) + (threadIdx.x >> log2_threads);
  const int64_t row = kOneRow ? 0 : quotient(group, columns);
  const int64_t first = (group - row * columns) * call.group;
  const int64_t left = row < call.rows ? call.length - first : 0;
  const int count = int(left < call.group ? left : call.group);  // not positive: there is no group
  const Pointer<T> x = kOneRow ? call.x.even_row<T>(0) : call.x.row<T>(row < call.rows ? row : 0);
  RowVector<T, kRun> runs[kRuns];
#pragma unroll
  for (int k = 0; k < kRuns; ++k) {
    const int i = (k * threads + rank) * kRun;
    if (i < count) runs[k] = fetch<kRun>(x, first + i, kRun, true);
  }
  Largest found;
#pragma unroll
  for (int k = 0; k < kRuns; ++k) {
    if ((k * threads + rank) * kRun >= count) continue;
    found = larger(found, measure_all(runs[k], kRun, Coding::kAsymmetric));
  }
  found = largest_of_team(found, log2_threads, Coding::kAsymmetric);
  if (count <= 0) return;
  const ScaleAndOffset scale = scale_of(coding, found);
  if (rank == 0) store_scale(call, group, scale);
  const Grid grid = grid_of(scale, Coding::kAsymmetric);
#pragma unroll
  for (int k = 0; k < kRuns; ++k) {
    const int i = (k * threads + rank) * kRun;
    if (i < count) put_run(call, coding, runs[k], grid, scale, kOneRow ? 0 : row, first + i);
  }
}

// A block takes a group of several rows.
constexpr int kRunsOfTile = 4;  // of a thread
constexpr int64_t kMostOfTile = kRunsOfTile * kThreads * kRun;

template <class T, class Coding>
__global__ void __launch_bounds__(kThreads, 2)
    tiles_kernel(const __grid_constant__ Quantize call, const Coding coding, int64_t columns) {
  const int64_t band = quotient(blockIdx.x, columns), column = blockIdx.x - band * columns;
  const int64_t first_row = band * call.group_rows, first = column * call.group;
  const int64_t rows_left = call.rows - first_row, left = call.length - first;
  const int rows = int(rows_left < call.group_rows ? rows_left : call.group_rows);
  const int of_row = int(left < call.group ? left : call.group) / kRun;  // runs
  RowVector<T, kRun> runs[kRunsOfTile];
  Largest found;
#pragma unroll
  for (int k = 0; k < kRunsOfTile; ++k) {
    const int run = k * kThreads + int(threadIdx.x), row = run / of_row;
    if (row >= rows) continue;
    runs[k] = fetch<kRun>(call.x.row<T>(first_row + row), first + (run - row * of_row) * kRun, kRun,
                          true);
  }
#pragma unroll
  for (int k = 0; k < kRunsOfTile; ++k) {
    if ((k * kThreads + int(threadIdx.x)) / of_row >= rows) continue;
    found = larger(found, measure_all(runs[k], kRun, Coding::kAsymmetric));
  }
  constexpr int kLog2Threads = 8;
  static_assert(1 << kLog2Threads == kThreads);
  const ScaleAndOffset scale =
      scale_of(coding, largest_of_team(found, kLog2Threads, Coding::kAsymmetric));
  if (threadIdx.x == 0) store_scale(call, blockIdx.x, scale);
  const Grid grid = grid_of(scale, Coding::kAsymmetric);
#pragma unroll
  for (int k = 0; k < kRunsOfTile; ++k) {
    const int run = k * kThreads + int(threadIdx.x), row = run / of_row;
    if (row >= rows) continue;
    put_run(call, coding, runs[k], grid, scale, first_row + row,
            first + (run - row * of_row) * kRun);
  }
}

// The general way: the largest of each group, of which a warp takes a piece of one row.
constexpr int64_t kPiece = 1024;

__global__ void __launch_bounds__(kThreads)
    measure_kernel(const __grid_constant__ Quantize call, int64_t columns, int64_t of_group) {
  const int64_t piece = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  const int64_t of_row = columns * of_group, row = quotient(piece, of_row);
  if (row >= call.rows) return;
  const int64_t column = quotient(piece - row * of_row, of_group);
  const int64_t begin = column * call.group, group_end = begin + call.group;
  const int64_t first = begin + (piece - row * of_row - column * of_group) * kPiece;
  const int64_t row_end = group_end < call.length ? group_end : call.length;
  const int64_t end = first + kPiece < row_end ? first + kPiece : row_end;
  const Pointer<Any> x = call.x.row<Any>(row);
  const int lane = int(threadIdx.x) % kWarp;
  Largest found = largest_of_eights(x, first + lane * kEight, end, kWarp * kEight, call.asymmetric);
  found = largest_of_lanes(found, kWarp, call.asymmetric);
  if (lane != 0 || first >= end) return;
  const int64_t group = quotient(row, call.group_rows) * columns + column;
  atomicMax(reinterpret_cast<uint32_t*>(call.scales + group), found.magnitude_or_order);
  if (!call.asymmetric) return;
  atomicMax(reinterpret_cast<uint32_t*>(call.offsets + group), found.flipped);
}

__global__ void __launch_bounds__(kThreads)
    finish_kernel(const __grid_constant__ Quantize call, int64_t groups) {
  const int64_t group = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (group >= groups) return;
  const uint32_t flipped = call.asymmetric ? dsx::bits_of(call.offsets[group]) : 0;
  const Largest found{dsx::bits_of(call.scales[group]), flipped};
  with_coding(call.format, call.asymmetric,
              [&](const auto& coding) { store_scale(call, group, scale_of(coding, found)); });
}

// Where eight elements of a row are, and their groups.
struct Eight {
  int64_t row, i, band;  // band: the first group of the rows
  int count;             // 0: behind the end

  __device__ Eight(const Groups& call, int64_t columns, int64_t of_row, int64_t number) {
    row = call.rows > 1 ? quotient(number, of_row) : 0;
    i = (number - row * of_row) * kEight;
    const int64_t left = row < call.rows ? call.length - i : 0;
    count = int(left < kEight ? (left > 0 ? left : 0) : kEight);
    band = call.group_rows == 1 ? row * columns : quotient(row, call.group_rows) * columns;
  }
};

__global__ void __launch_bounds__(kThreads)
    round_kernel(const __grid_constant__ Quantize call, int64_t columns, int64_t of_row,
                 bool aligned) {
  const int64_t number = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const Eight at(call, columns, of_row, number);
  if (at.count == 0) return;
  const auto x = floats_of(fetch<kEight>(call.x.row<Any>(at.row), at.i, at.count, aligned));
  const Noise noise = noise_from(call.noise, at.row * call.length + at.i);
  const bool whole = aligned && at.count == kEight;
  with_coding(call.format, call.asymmetric, [&](const auto& coding) {
    Codes<kEight> codes{};
    Floats<kEight> values(0.0f);
    for_each_group(call.group, at.i, at.count, [&](int first, int last, int64_t column) {
      const ScaleAndOffset scale = stored_scale(call, at.band + column);
      const auto all = encode_all(coding, x, grid_of(scale, call.asymmetric), noise);
      const auto these = scaled_all(decode_all(coding, all), scale);
#pragma unroll
      for (int k = 0; k < kEight; ++k) {
        if (k < first || k >= last) continue;
        codes.words[k / 4] |= all.at(k) << (8 * (k % 4));
        values.lanes[k] = these.lanes[k];
      }
    });
    if (call.codes != nullptr) {
      uint8_t* row = call.codes + at.row * bytes_of_row(call.format, call.length);
      store_codes(row, at.i, at.count, whole, bits_of_code(call.format) == 4, codes);
    } else {
      put(call.out.row<Any>(at.row), at.i, at.count, aligned, values);
    }
  });
}

// Of whole groups of eights in a single row, all of it aligned: vectors of a block follow each
// other.
constexpr int kVectors = 4;  // of a thread: their loads are under way together

template <class T, class Coding>
__global__ void __launch_bounds__(kThreads)
    dequantize_row_kernel(const __grid_constant__ Dequantize call, const Coding coding,
                          int log2_group) {
  const bool is_nibble = bits_of_code(call.format) == 4;
  const int64_t begin = (int64_t(blockIdx.x) * (kVectors * kThreads) + threadIdx.x) * kEight;
  uint2 codes[kVectors];
  ScaleAndOffset scales[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t i = begin + v * (kThreads * kEight);
    if (i >= call.length) continue;
    if (is_nibble) {
      codes[v].x = __ldcs(reinterpret_cast<const uint32_t*>(call.codes + i / 2));
    } else {
      codes[v] = __ldcs(reinterpret_cast<const uint2*>(call.codes + i));
    }
    scales[v] = stored_scale(call, log2_group < 0 ? quotient(i, call.group) : i >> log2_group);
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t i = begin + v * (kThreads * kEight);
    if (i >= call.length) continue;
    Floats<kEight> numbers;
    if constexpr (Coding::kMayBeNibbles) {
      numbers = is_nibble ? decode_nibbles(coding, codes[v].x)
                          : decode_all(coding, Codes<kEight>{codes[v].x, codes[v].y});
    } else {
      numbers = decode_all(coding, Codes<kEight>{codes[v].x, codes[v].y});
    }
    put<Stored::streamed>(call.out.even_row<T>(0), i, kEight, true, scaled_all(numbers, scales[v]));
  }
}

// The general way.
__global__ void __launch_bounds__(kThreads)
    dequantize_kernel(const __grid_constant__ Dequantize call, int64_t columns, int64_t of_row,
                      bool aligned) {
  const Eight at(call, columns, of_row, int64_t(blockIdx.x) * kThreads + threadIdx.x);
  if (at.count == 0) return;
  const bool whole = aligned && at.count == kEight;
  const uint8_t* row = call.codes + at.row * bytes_of_row(call.format, call.length);
  const Codes<kEight> codes =
      load_codes(row, at.i, at.count, whole, bits_of_code(call.format) == 4);
  Floats<kEight> numbers;
  with_coding(call.format, call.asymmetric,
              [&](const auto& coding) { numbers = decode_all(coding, codes); });
  Floats<kEight> values = numbers;
  for_each_group(call.group, at.i, at.count, [&](int first, int last, int64_t column) {
    const auto these = scaled_all(numbers, stored_scale(call, at.band + column));
#pragma unroll
    for (int k = 0; k < kEight; ++k) {
      if (k >= first && k < last) values.lanes[k] = these.lanes[k];
    }
  });
  put(call.out.even_row<Any>(at.row), at.i, at.count, aligned, values);
}

bool codes_aligned(const Groups& call, const void* codes) {
  return call.length % kEight == 0 && reinterpret_cast<uintptr_t>(codes) % kEight == 0;
}

// Rows that follow each other without a gap and have whole groups are as good as a single one.
template <class Call>
void join_rows(Call& call, std::initializer_list<const Rows*> all) {
  if (call.group_rows != 1 || call.length % call.group != 0) return;
  if (bits_of_code(call.format) == 4 && call.length % 2 != 0) return;
  for (const Rows* rows : all) {
    if (rows->is_present() && (rows->pitch != call.length || rows->group > 0)) return;
  }
  call.length *= call.rows;
  call.rows = 1;
}

unsigned blocks_for(int64_t threads) { return unsigned(ceil_div(threads, kThreads)); }

void quantize_in_registers(const Quantize& call, cudaStream_t stream) {
  const int64_t columns = call.columns(), group = std::min(call.group, call.length);
  int log2_threads = 0;
  while ((int64_t(kRuns * kRun) << log2_threads) < group) ++log2_threads;
  const int of_block = std::max(kThreads, 1 << log2_threads);
  with_storage_type(call.x.dtype, [&](auto storage) {
    using T = decltype(storage);
    const unsigned blocks = unsigned(ceil_div(call.rows * columns, of_block >> log2_threads));
    with_coding(call.format, call.asymmetric, [&](const auto& coding) {
      using Coding = std::remove_cvref_t<decltype(coding)>;
      const auto kernel =
          call.rows == 1 ? groups_kernel<T, true, Coding> : groups_kernel<T, false, Coding>;
      kernel<<<blocks, of_block, 0, stream>>>(call, coding, columns, log2_threads);
    });
  });
}

void quantize_in_tiles(const Quantize& call, cudaStream_t stream) {
  const int64_t columns = call.columns();
  with_storage_type(call.x.dtype, [&](auto storage) {
    with_coding(call.format, call.asymmetric, [&](const auto& coding) {
      tiles_kernel<decltype(storage)>
          <<<unsigned(call.bands() * columns), kThreads, 0, stream>>>(call, coding, columns);
    });
  });
}

void quantize_in_two_passes(const Quantize& call, cudaStream_t stream) {
  const int64_t columns = call.columns(), groups = call.bands() * columns;
  const int64_t of_group = ceil_div(std::min(call.group, call.length), kPiece);
  const size_t bytes = size_t(groups) * sizeof(float);
  cuda::check(cudaMemsetAsync(call.scales, 0, bytes, stream), kOp);
  if (call.asymmetric) cuda::check(cudaMemsetAsync(call.offsets, 0, bytes, stream), kOp);
  const int64_t pieces = call.rows * columns * of_group;
  measure_kernel<<<blocks_for(pieces * kWarp), kThreads, 0, stream>>>(call, columns, of_group);
  finish_kernel<<<blocks_for(groups), kThreads, 0, stream>>>(call, groups);
  const int64_t of_row = ceil_div(call.length, kEight);
  const bool aligned =
      all_aligned({call.x, call.out}) && (call.codes == nullptr || codes_aligned(call, call.codes));
  round_kernel<<<blocks_for(call.rows * of_row), kThreads, 0, stream>>>(call, columns, of_row,
                                                                        aligned);
}

}  // namespace

bool quantize_cuda_measures_before(const Quantize& call) {
  const int64_t group = std::min(call.group, call.length);
  const bool fits = call.group_rows == 1
                        ? group <= kMostOfTeam
                        : std::min(call.group_rows, call.rows) <= kMostOfTile / group;
  return !fits || call.length % kRun != 0 || call.group % kRun != 0 ||
         reinterpret_cast<uintptr_t>(call.codes) % kRun != 0 || !all_aligned({call.x, call.out});
}

void quantize_cuda(const Quantize& one, void* stream) {
  Quantize call = one;
  cuda::check(cudaPeekAtLastError(), kOp);  // of somebody before
  if (quantize_cuda_measures_before(call)) {
    quantize_in_two_passes(call, cudaStream_t(stream));
  } else if (call.group_rows != 1) {
    quantize_in_tiles(call, cudaStream_t(stream));
  } else {
    join_rows(call, {&call.x, &call.out});
    quantize_in_registers(call, cudaStream_t(stream));
  }
  cuda::check(cudaGetLastError(), kOp);
}

void dequantize_cuda(const Dequantize& one, void* stream) {
  Dequantize call = one;
  cuda::check(cudaPeekAtLastError(), kDequantize);  // of somebody before
  const bool aligned = codes_aligned(call, call.codes) && all_aligned({call.out});
  join_rows(call, {&call.out});
  const int64_t of_row = ceil_div(call.length, kEight);
  if (aligned && call.rows == 1 && call.group_rows == 1 && call.group % kEight == 0) {
    const bool is_power = (call.group & (call.group - 1)) == 0;
    const int log2_group = is_power ? __builtin_ctzll(uint64_t(call.group)) : -1;
    with_storage_type(call.out.dtype, [&](auto storage) {
      with_coding(call.format, call.asymmetric, [&](const auto& coding) {
        dequantize_row_kernel<decltype(storage)>
            <<<blocks_for(ceil_div(of_row, kVectors)), kThreads, 0, cudaStream_t(stream)>>>(
                call, coding, log2_group);
      });
    });
  } else {
    dequantize_kernel<<<blocks_for(call.rows * of_row), kThreads, 0, cudaStream_t(stream)>>>(
        call, call.columns(), of_row, aligned);
  }
  cuda::check(cudaGetLastError(), kDequantize);
}

}  // namespace dsx
