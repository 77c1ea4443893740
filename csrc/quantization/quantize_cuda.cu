// quantize and dequantize on CUDA. A team of neighbouring threads has a group in its registers, and
// so reads it once; of groups that do not fit, or lie in several rows or not by eights, the largest
// are found first.
#include "quantization/quantize_cuda.cuh"

namespace dsx {
namespace {

using namespace cuda;

constexpr const char* kOp = "quantize";
constexpr const char* kDequantize = "dequantize";
constexpr int kOfThread = 2;            // vectors of eight elements
constexpr int64_t kMostThreads = 1024;  // of a team
constexpr int64_t kMostOfTeam = kMostThreads * kOfThread * kEight;

// Stores what eight elements become: their codes, or what these stand for.
template <class T, class Coding>
__device__ inline void put_eight(const Quantize& call, const Coding& coding, const Codes& codes,
                                 int64_t row, int64_t i, int count, bool aligned,
                                 const ScaleAndOffset& scale) {
  if (call.codes != nullptr) {
    uint8_t* codes_of_row = call.codes + row * bytes_of_row(call.format, call.length);
    store_codes(codes_of_row, i, count, aligned, bits_of_code(call.format) == 4, codes);
  } else {
    put<Stored::streamed>(call.out.row<T>(row), i, count, aligned,
                          scaled_eight(decode_eight(coding, codes), scale));
  }
}

template <class T>
__global__ void __launch_bounds__(kMostThreads)
    groups_kernel(const __grid_constant__ Quantize call, int64_t columns, int log2_threads) {
  const int threads = 1 << log2_threads;  // of a team
  const int rank = int(threadIdx.x) & (threads - 1);
  const int64_t group = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) >> log2_threads;
  const int64_t row = call.rows > 1 ? quotient(group, columns) : 0;
  const int64_t first = (group - row * columns) * call.group;
  const int64_t left = group < call.rows * columns ? call.length - first : 0;
  const int count = int(left < call.group ? left : call.group);
  RowVector<T, kEight> x[kOfThread];
  Largest found;
#pragma unroll
  for (int k = 0; k < kOfThread; ++k) {
    const int i = (k * threads + rank) * kEight;
    if (i < count) x[k] = fetch<kEight>(call.x.row<T>(row), first + i, kEight, true);
  }
#pragma unroll
  for (int k = 0; k < kOfThread; ++k) {
    if ((k * threads + rank) * kEight >= count) continue;
    found = larger(found, measure_eight<T>(x[k], kEight, call.asymmetric));
  }
  found = largest_of_lanes(found, threads < kWarp ? threads : kWarp, call.asymmetric);
  if (threads > kWarp) {
    __shared__ Largest of_warps[kMostThreads / kWarp];
    if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = found;
    __syncthreads();
    const int first_warp = int(threadIdx.x) >> log2_threads << (log2_threads - 5);
    for (int w = 0; w < threads / kWarp; ++w) found = larger(found, of_warps[first_warp + w]);
  }
  if (count <= 0) return;
  const ScaleAndOffset scale = scale_of(call, found);
  if (rank == 0) store_scale(call, group, scale);
  const Grid grid = grid_of(scale, call.asymmetric);
  with_coding(call.format, call.asymmetric, [&](const auto& coding) {
#pragma unroll
    for (int k = 0; k < kOfThread; ++k) {
      const int i = (k * threads + rank) * kEight;
      if (i >= count) continue;
      const Noise noise = noise_from(call.noise, row * call.length + first + i);
      const Codes codes = encode_eight(coding, floats_of(x[k]), grid, noise);
      put_eight<T>(call, coding, codes, row, first + i, kEight, true, scale);
    }
  });
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
  Largest found;
  for (int64_t i = first + lane * kEight; i < end; i += kWarp * kEight) {
    const int count = int(end - i < kEight ? end - i : kEight);
    const bool aligned = is_aligned<kEight>((x + i).address, bytes_of(x.dtype));
    const auto vector = fetch<kEight>(x, i, count, aligned);
    found = larger(found, measure_eight<Any>(vector, count, call.asymmetric));
  }
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
  store_scale(call, group, scale_of(call, {dsx::bits_of(call.scales[group]), flipped}));
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

  // Calls body(first, last, group) for the elements of each group.
  template <class Body>
  __device__ void for_each_group(const Groups& call, const Body& body) const {
    int64_t column = quotient(i, call.group);
    for (int k = 0; k < count;) {
      const int64_t left = (column + 1) * call.group - i;
      const int last = left < count ? int(left) : count;
      body(k, last, band + column);
      k = last;
      ++column;
    }
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
    Codes codes{};
    Floats<kEight> values(0.0f);
    at.for_each_group(call, [&](int first, int last, int64_t group) {
      const ScaleAndOffset scale = stored_scale(call, group);
      const Codes all = encode_eight(coding, x, grid_of(scale, call.asymmetric), noise);
      const auto these = scaled_eight(decode_eight(coding, all), scale);
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

// T: all groups are of eights and everything is aligned; Any: whatever there is.
template <class T>
__global__ void __launch_bounds__(kThreads)
    dequantize_kernel(const __grid_constant__ Dequantize call, int64_t columns, int64_t of_row) {
  constexpr bool kAligned = !std::is_same_v<T, Any>;
  constexpr int kVectors = kAligned ? 2 : 1;  // the loads of both are under way together
  const bool is_nibble = bits_of_code(call.format) == 4;
  Codes codes[kVectors];
  ScaleAndOffset scales[kVectors];
  const int64_t threads = int64_t(gridDim.x) * kThreads;
  const int64_t number = int64_t(blockIdx.x) * kThreads + threadIdx.x;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const Eight at(call, columns, of_row, number + v * threads);
    if (at.count == 0) continue;
    const uint8_t* row = call.codes + at.row * bytes_of_row(call.format, call.length);
    codes[v] = load_codes(row, at.i, at.count, kAligned, is_nibble);
    if (kAligned) scales[v] = stored_scale(call, at.band + quotient(at.i, call.group));
  }
  with_coding(call.format, call.asymmetric, [&](const auto& coding) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const Eight at(call, columns, of_row, number + v * threads);
      if (at.count == 0) continue;
      const Floats<kEight> numbers = decode_eight(coding, codes[v]);
      Floats<kEight> values = numbers;
      if constexpr (kAligned) {
        values = scaled_eight(numbers, scales[v]);
      } else {
        at.for_each_group(call, [&](int first, int last, int64_t group) {
          const auto these = scaled_eight(numbers, stored_scale(call, group));
#pragma unroll
          for (int k = 0; k < kEight; ++k) {
            if (k >= first && k < last) values.lanes[k] = these.lanes[k];
          }
        });
      }
      put<Stored::streamed>(call.out.row<T>(at.row), at.i, at.count, kAligned, values);
    }
  });
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
    if (rows->data != nullptr && (rows->pitch != call.length || rows->group > 0)) return;
  }
  call.length *= call.rows;
  call.rows = 1;
}

unsigned blocks_for(int64_t threads) { return unsigned(ceil_div(threads, kThreads)); }

void quantize_in_registers(const Quantize& call, cudaStream_t stream) {
  const int64_t columns = call.columns(), group = std::min(call.group, call.length);
  int log2_threads = 0;
  while ((int64_t(kOfThread * kEight) << log2_threads) < group) ++log2_threads;
  const int64_t threads = call.rows * columns << log2_threads;
  const int of_block = std::max(kThreads, 1 << log2_threads);
  with_storage_type(call.x.dtype, [&](auto storage) {
    groups_kernel<decltype(storage)>
        <<<unsigned(ceil_div(threads, of_block)), of_block, 0, stream>>>(call, columns,
                                                                         log2_threads);
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
  const bool by_eights = call.length % kEight == 0 && call.group % kEight == 0;
  return call.group_rows != 1 || !by_eights || std::min(call.group, call.length) > kMostOfTeam ||
         !all_aligned({call.x, call.out}) ||
         (call.codes != nullptr && !codes_aligned(call, call.codes));
}

void quantize_cuda(const Quantize& one, void* stream) {
  Quantize call = one;
  cuda::check(cudaPeekAtLastError(), kOp);  // of somebody before
  if (quantize_cuda_measures_before(call)) {
    quantize_in_two_passes(call, cudaStream_t(stream));
  } else {
    join_rows(call, {&call.x, &call.out});
    quantize_in_registers(call, cudaStream_t(stream));
  }
  cuda::check(cudaGetLastError(), kOp);
}

void dequantize_cuda(const Dequantize& one, void* stream) {
  Dequantize call = one;
  cuda::check(cudaPeekAtLastError(), kDequantize);  // of somebody before
  const bool aligned = call.group % kEight == 0 && call.length % kEight == 0 &&
                       all_aligned({call.out}) && codes_aligned(call, call.codes);
  join_rows(call, {&call.out});
  const int64_t of_row = ceil_div(call.length, kEight), vectors = call.rows * of_row;
  const auto launch = [&](auto storage) {
    constexpr int kOfEach = std::is_same_v<decltype(storage), Any> ? 1 : 2;
    dequantize_kernel<decltype(storage)>
        <<<blocks_for(ceil_div(vectors, kOfEach)), kThreads, 0, cudaStream_t(stream)>>>(
            call, call.columns(), of_row);
  };
  if (aligned) {
    with_storage_type(call.out.dtype, launch);
  } else {
    launch(Any{});
  }
  cuda::check(cudaGetLastError(), kDequantize);
}

}  // namespace dsx
