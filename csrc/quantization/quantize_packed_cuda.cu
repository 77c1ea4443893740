// quantize_packed on CUDA. A block takes a row, a thread 32 neighbours in it at a time, which
// become one or two runs of 16 bytes. Groups that are a power of two of these are in the registers
// of a few lanes of a warp, and are read once; others are measured before by the same block, and so
// read again from its cache.
#include "quantization/quantize_cuda.cuh"
#include "quantization/quantize_packed.h"

namespace dsx {
namespace {

using namespace cuda;

constexpr const char* kOp = "quantize_packed_";
constexpr int kOfThread = 32;         // elements
constexpr int kMostThreads = 512;     // of a block
constexpr int kUsualThreads = 128;    // likewise, where there are many rows
constexpr int64_t kAtOnce = 1 << 17;  // threads, half of those that a large GPU runs at once

template <class T>
using Neighbours = RowVector<T, kOfThread>;

// Eight of them.
template <class T>
__device__ inline Floats<kEight> eight_of(const Neighbours<T>& all, int number) {
  RowVector<T, kEight> eight;
  if constexpr (std::is_same_v<T, Any>) {
#pragma unroll
    for (int k = 0; k < kEight; ++k) {
      eight.elements.lanes[k] = all.elements.lanes[number * kEight + k];
    }
  } else {
#pragma unroll
    for (int k = 0; k < eight.kAccesses; ++k) {
      eight.words[k] = all.words[number * eight.kAccesses + k];
    }
  }
  return floats_of(eight);
}

// Their codes in the order of packed_weight.h.
template <int kBits>
struct Runs {
  static constexpr int kEights = kRunBytes / kBits;             // of a run
  static constexpr int kWords = kOfThread * kBits / 32;         // in all
  static constexpr uint32_t kOnes = ~0u / ((1u << kBits) - 1);  // a 1 in the place of each code
  uint32_t words[kWords] = {};

  // Puts the codes of eight elements in their places. The lower half of each has nothing else but,
  // of 8 bits, in its upper byte.
  __device__ void put(const uint32_t (&codes)[kEight], int number) {
    const int before = number / kEights * 4, place = number % kEights;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      uint32_t& word = words[before + w];
      const uint32_t pair = __byte_perm(codes[2 * w], codes[2 * w + 1], 0x5410);
      if (place == 0) {
        word = pair;
      } else if constexpr (kBits == 8) {
        word = __byte_perm(word, pair, 0x6240);
      } else {
        word += pair << (kBits * place);
      }
    }
  }

  __device__ void fill(uint32_t code) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[w] = code * kOnes;
  }

  __device__ void store(uint8_t* target) const {
    if (reinterpret_cast<uintptr_t>(target) % kRunBytes == 0) {
#pragma unroll
      for (int w = 0; w < kWords; w += 4) {
        const uint4 run{words[w], words[w + 1], words[w + 2], words[w + 3]};
        __stcs(reinterpret_cast<uint4*>(target + 4 * w), run);
      }
      return;
    }
#pragma unroll 1
    for (int shift = 0; shift < 32; shift += 8) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) target[4 * w + shift / 8] = uint8_t(words[w] >> shift);
    }
  }
};

// How far elements of a group are from their codes, in parts of the scale.
struct Rests {
  float largest = 0, squares = 0;  // `largest` as positions

  // Takes in elements [first, last).
  template <class Coding>
  __device__ void add(const Coding& coding, const Floats<kEight>& x,
                      const uint32_t (&codes)[kEight], const Grid& grid, int first, int last) {
#pragma unroll
    for (int k = 0; k < kEight; ++k) {
      if (k < first || k >= last) continue;
      const float position = position_of(x.lanes[k], grid, Coding::kAsymmetric);
      const float rest = rest_of(position, coding.template number_of<float>(codes[k]), grid);
      largest = ::fmaxf(largest, ::fabsf(rest));
      const float relative = rest * grid.inverse;
      squares = dsx::multiply_add(relative, relative, squares);
    }
  }
};

struct ErrorsOfThread {
  uint32_t largest = 0;  // the bits of a float: so NaN wins
  double squares = 0;

  __device__ void add(const Rests& rests, const Grid& grid, float scale) {
    const uint32_t bits = dsx::bits_of(rests.largest * grid.inverse);  // NaN if the scale is
    largest = dsx::max(largest, magnitude_of(bits));
    squares += double(rests.squares) * (double(scale) * double(scale));
  }
};

// Of a group that these lanes of the warp have, a power of two: from element i on all of them, or
// none, behind the end of the row.
template <int kBits, class T, class Coding>
__device__ inline Runs<kBits> round_in_lanes(const QuantizePacked& call, const Coding& coding,
                                             const Neighbours<T>& x, int64_t row, int i,
                                             int log2_lanes, ErrorsOfThread& errors) {
  const bool is_there = i < call.length;
  Largest found;
  if (is_there) found = measure_all(x, kOfThread, Coding::kAsymmetric);
  const int lanes = 1 << log2_lanes;
  found = largest_of_lanes(found, lanes, Coding::kAsymmetric);
  Runs<kBits> runs;
  runs.fill(packed_padding(call.format));
  if (!is_there) return runs;
  const ScaleAndOffset scale = scale_of(coding, found);
  if ((threadIdx.x & (lanes - 1)) == 0) {
    const int64_t place = call.place_of_scale(unsigned(i / kOfThread) >> log2_lanes, row);
    call.scales[place] = scale.scale;
    if (Coding::kAsymmetric) call.offsets[place] = scale.offset;
  }
  const Grid grid = grid_of(scale, Coding::kAsymmetric);
  Rests rests;
#pragma unroll
  for (int p = 0; p < kOfThread / kEight; ++p) {
    const Floats<kEight> eight = eight_of(x, p);
    uint32_t codes[kEight];
    encode_each(coding, eight, grid, Noise{}, codes);
    if (call.errors != nullptr) rests.add(coding, eight, codes, grid, 0, kEight);
    runs.put(codes, p);
  }
  if (call.errors != nullptr) errors.add(rests, grid, scale.scale);
  const uint32_t sign = sign_of_packed(call.format, Coding::kAsymmetric) * runs.kOnes;
#pragma unroll
  for (int w = 0; w < runs.kWords; ++w) runs.words[w] = (runs.words[w] & grid.mask) ^ sign;
  return runs;
}

// What has been measured of the group that element i of a row is in.
struct GroupAt {
  int64_t end;
  float scale;
  Grid grid;

  template <class Coding>
  __device__ static GroupAt of(const QuantizePacked& call, const Coding&, int64_t row, int64_t i) {
    const int64_t column = quotient(i, call.group);
    const ScaleAndOffset scale = stored_scale(call, call.place_of_scale(column, row));
    return {(column + 1) * call.group, scale.scale, grid_of(scale, Coding::kAsymmetric)};
  }
};

// Of groups of any size: from element i on `count` of them are in the row.
template <int kBits, class T, class Coding>
__device__ inline Runs<kBits> round_measured(const QuantizePacked& call, const Coding& coding,
                                             const Neighbours<T>& x, int64_t row, int64_t i,
                                             int count, ErrorsOfThread& errors) {
  Runs<kBits> runs;
  runs.fill(packed_padding(call.format));
  if (count <= 0) return runs;
  const uint32_t sign = sign_of_packed(call.format, Coding::kAsymmetric);
  constexpr uint32_t kMask = (1u << kBits) - 1;
  GroupAt group = GroupAt::of(call, coding, row, i);
#pragma unroll
  for (int p = 0; p < kOfThread / kEight; ++p) {
    const int64_t begin = i + p * kEight;
    const int there = count - p * kEight < kEight ? count - p * kEight : kEight;
    const Floats<kEight> eight = eight_of(x, p);
    uint32_t codes[kEight];
#pragma unroll
    for (int k = 0; k < kEight; ++k) codes[k] = packed_padding(call.format);
#pragma unroll 1
    for (int first = 0; first < there;) {
      if (begin + first >= group.end) group = GroupAt::of(call, coding, row, begin + first);
      const int last = group.end - begin < there ? int(group.end - begin) : there;
      uint32_t these[kEight];
      encode_each(coding, eight, group.grid, Noise{}, these);
      if (call.errors != nullptr) {
        Rests rests;
        rests.add(coding, eight, these, group.grid, first, last);
        errors.add(rests, group.grid, group.scale);
      }
#pragma unroll
      for (int k = 0; k < kEight; ++k) {
        const uint32_t code = (these[k] & group.grid.mask & kMask) ^ sign;
        codes[k] = k >= first && k < last ? code : codes[k];
      }
      first = last;
    }
    runs.put(codes, p);
  }
  return runs;
}

// The largest of what each warp has found, in every thread; all of the block take part.
__device__ inline Largest largest_of_block(const Largest& of_warp) {
  __shared__ Largest of_warps[kMostThreads / kWarp];
  __syncthreads();  // of what was there before, all have been read
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = of_warp;
  __syncthreads();
  Largest found;
#pragma unroll 1
  for (int w = 0; w < int(blockDim.x) / kWarp; ++w) found = larger(found, of_warps[w]);
  return found;
}

// Writes the scales of a row. `team` neighbouring threads take a group: some of a warp, a power of
// two, or the block.
template <class Coding>
__device__ inline void measure_row(const QuantizePacked& call, const Coding& coding, int64_t row,
                                   int team) {
  const Pointer<Any> x = call.x.even_row<Any>(row);
  const int64_t columns = call.columns();
  const int teams = int(blockDim.x) / team, rank = int(threadIdx.x) % team;
  for (int64_t before = 0; before < columns; before += teams) {
    const int64_t column = before + int(threadIdx.x) / team, begin = column * call.group;
    const int64_t end = begin + call.group < call.length ? begin + call.group : call.length;
    Largest found = largest_of_eights(x, begin + rank * kEight, end, int64_t(team) * kEight,
                                      Coding::kAsymmetric);
    found = largest_of_lanes(found, team < kWarp ? team : kWarp, Coding::kAsymmetric);
    if (team > kWarp) found = largest_of_block(found);
    if (rank == 0 && column < columns) {
      store_scale(call, call.place_of_scale(column, row), scale_of(coding, found));
    }
  }
  __syncthreads();
}

// Adds up what the threads of the block have found, in a fixed order.
__device__ inline void store_errors(const QuantizePacked& call, int64_t row,
                                    ErrorsOfThread errors) {
  __shared__ uint32_t largest[kMostThreads / kWarp];
  __shared__ double squares[kMostThreads / kWarp];
  errors.largest = max_of_warp(errors.largest);
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    errors.squares += __shfl_xor_sync(~0u, errors.squares, distance);
  }
  const int warp = int(threadIdx.x) / kWarp;
  if (threadIdx.x % kWarp == 0) {
    largest[warp] = errors.largest;
    squares[warp] = errors.squares;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
#pragma unroll 1
  for (int w = 1; w < int(blockDim.x) / kWarp; ++w) {
    errors.largest = dsx::max(errors.largest, largest[w]);
    errors.squares += squares[w];
  }
  call.errors[row * kRowErrors] = double(dsx::float_of(errors.largest));
  call.errors[row * kRowErrors + 1] = errors.squares;
}

__device__ inline void pad_scales(const QuantizePacked& call) {
  const int64_t beyond = call.padded_rows() - call.rows;
  for (int64_t k = threadIdx.x; k < call.columns() * beyond; k += blockDim.x) {
    const int64_t column = quotient(k, beyond);
    store_scale(call, call.place_of_scale(column, call.rows + k - column * beyond), {0, 0});
  }
}

// Blocks that a multiprocessor must have registers for: elements of 16 bits take half as many, and
// groups that are measured before more.
template <class T, bool kMeasured>
constexpr int kBlocks = !kMeasured && sizeof(T) == 2 ? 2 : 1;

// `team`: log2 of the lanes that have a group, or of kMeasured as measure_row says.
template <int kBits, class T, class Coding, bool kMeasured>
__global__ void __launch_bounds__(kMostThreads, kBlocks<T, kMeasured>)
    rows_kernel(const __grid_constant__ QuantizePacked call, const Coding coding, int team,
                bool aligned) {
  using Index = std::conditional_t<kMeasured, int64_t, int>;  // in a row
  const int64_t row = blockIdx.x;
  const Index padded = Index(call.row_bytes * 8 / kBits), length = Index(call.length);
  const Pointer<T> x = call.x.even_row<T>(row);
  uint8_t* codes = call.codes + row * call.row_bytes;
  if constexpr (kMeasured) measure_row(call, coding, row, team);
  ErrorsOfThread errors;
  const Index tile = Index(blockDim.x) * kOfThread;
  for (Index first = 0; first < padded; first += tile) {  // lanes need each other
    const Index i = first + Index(threadIdx.x) * kOfThread;
    const int count = int(length - i < kOfThread ? length - i : kOfThread);
    Neighbours<T> all;
    if (count > 0) all = fetch<kOfThread>(x, i, count, aligned);
    Runs<kBits> runs;
    if constexpr (kMeasured) {
      runs = round_measured<kBits>(call, coding, all, row, i, count, errors);
    } else {
      runs = round_in_lanes<kBits>(call, coding, all, row, i, team, errors);
    }
    if (i < padded) runs.store(codes + i / (8 / kBits));
  }
  if (call.errors != nullptr) store_errors(call, row, errors);
  if (row == call.rows - 1) pad_scales(call);
}

// Enough for the row, and of few rows as many as there is something to do for.
int threads_of(const QuantizePacked& call) {
  int threads = kWarp;
  while (threads < kMostThreads && int64_t(threads) * kOfThread < call.length &&
         (threads < kUsualThreads || call.rows * threads < kAtOnce)) {
    threads *= 2;
  }
  return threads;
}

// The logarithm of how many lanes have a group, or -1 if groups are to be measured before.
int log2_lanes_of(const QuantizePacked& call) {
  int log2_lanes = 0;
  while ((int64_t(kOfThread) << log2_lanes) < call.group) ++log2_lanes;
  const bool is_whole = call.columns() <= 1 || int64_t(kOfThread) << log2_lanes == call.group;
  return is_whole && 1 << log2_lanes <= kWarp && call.length <= INT32_MAX / 2 ? log2_lanes : -1;
}

int team_of(const QuantizePacked& call, int threads) {
  if (call.group > int64_t(kWarp) * kOfThread) return threads;
  int team = 1;
  while (team < kWarp && int64_t(team) * kEight < call.group) team *= 2;
  return team;
}

}  // namespace

void quantize_packed_cuda(const QuantizePacked& call, void* stream) {
  cuda::check(cudaPeekAtLastError(), kOp);  // of somebody before
  const int threads = threads_of(call);
  const bool aligned = all_aligned({call.x});
  const bool is_whole = aligned && call.length % kOfThread == 0;  // in each thread
  const int log2_lanes = is_whole ? log2_lanes_of(call) : -1;
  const int team = log2_lanes < 0 ? team_of(call, threads) : log2_lanes;
  with_packed_coding(call.format, call.asymmetric, [&](const auto& coding, auto bits) {
    using Coding = std::remove_cvref_t<decltype(coding)>;
    constexpr int kBits = decltype(bits)::value;
    const auto launch = [&](auto kernel) {
      kernel<<<unsigned(call.rows), threads, 0, cudaStream_t(stream)>>>(call, coding, team,
                                                                        aligned);
    };
    if (!is_whole) return launch(rows_kernel<kBits, Any, Coding, true>);
    with_storage_type(call.x.dtype, [&](auto storage) {
      using T = decltype(storage);
      launch(log2_lanes < 0 ? rows_kernel<kBits, T, Coding, true>
                            : rows_kernel<kBits, T, Coding, false>);
    });
  });
  cuda::check(cudaGetLastError(), kOp);
}

}  // namespace dsx
