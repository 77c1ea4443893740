// quantize_packed on CUDA. A block takes a row, a thread 32 elements of it at a time, which become
// one or two runs of 16 bytes. Groups of a power of two of runs are in the registers of a few lanes
// of a warp, and are read once; others are measured before by the same block, and so read again
// from its cache.
#include "quantization/quantize_cuda.cuh"
#include "quantization/quantize_packed.h"

namespace dsx {
namespace {

using namespace cuda;

constexpr const char* kOp = "quantize_packed_";
constexpr int kOfThread = 32;         // elements, whose loads are under way together
constexpr int kMostThreads = 512;     // of a block
constexpr int kUsualThreads = 128;    // likewise, where there are many rows
constexpr int64_t kAtOnce = 1 << 17;  // threads, half of what a large GPU has room for

template <int kBits>
constexpr int kOfRun = kRunBytes * 8 / kBits;  // elements

// Eight of the elements of a run, which has as many words for each of them.
template <class T, int kCount>
__device__ inline Floats<kEight> eight_of(const RowVector<T, kCount>& run, int number) {
  RowVector<T, kEight> eight;
  if constexpr (std::is_same_v<T, Any>) {
#pragma unroll
    for (int k = 0; k < kEight; ++k) {
      eight.elements.lanes[k] = run.elements.lanes[number * kEight + k];
    }
  } else {
#pragma unroll
    for (int k = 0; k < eight.kAccesses; ++k) {
      eight.words[k] = run.words[number * eight.kAccesses + k];
    }
  }
  return floats_of(eight);
}

// 16 bytes of codes in the order of packed_weight.h.
template <int kBits>
struct Run {
  static constexpr int kEights = kOfRun<kBits> / kEight;
  uint32_t words[4] = {};

  // Puts the codes of eight elements in their places, of which the lower half of each word has
  // nothing else but, in the upper byte, of codes of 8 bits.
  __device__ void put(const uint32_t (&codes)[kEight], int number) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const uint32_t pair = __byte_perm(codes[2 * w], codes[2 * w + 1], 0x5410);
      if (number == 0) {
        words[w] = pair;
      } else if constexpr (kBits == 8) {
        words[w] = __byte_perm(words[w], pair, 0x6240);
      } else {
        words[w] += pair << (kBits * number);
      }
    }
  }

  // The same code in all places.
  __device__ static Run filled(uint32_t code) {
    const uint32_t word = code * (kBits == 8 ? 0x01010101 : 0x11111111);
    return {{word, word, word, word}};
  }

  __device__ void store(uint8_t* target) const {
    if (reinterpret_cast<uintptr_t>(target) % kRunBytes == 0) {
      return __stcs(reinterpret_cast<uint4*>(target),
                    uint4{words[0], words[1], words[2], words[3]});
    }
#pragma unroll
    for (int k = 0; k < kRunBytes; ++k) target[k] = uint8_t(words[k / 4] >> (8 * (k % 4)));
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

// A run of a group that these lanes of the warp have: all of it, or behind the end.
template <class T, class Coding, int kBits>
__device__ inline Run<kBits> round_in_lanes(const QuantizePacked& call, const Coding& coding,
                                            const RowVector<T, kOfRun<kBits>>& x, int64_t row,
                                            int64_t i, int log2_lanes, ErrorsOfThread& errors) {
  const bool is_there = i < call.length;
  Largest found;
  if (is_there) found = measure_all(x, kOfRun<kBits>, Coding::kAsymmetric);
  const int lanes = 1 << log2_lanes;
  found = largest_of_lanes(found, lanes, Coding::kAsymmetric);
  if (!is_there) return Run<kBits>::filled(packed_padding(call.format));
  const ScaleAndOffset scale = scale_of(coding, found);
  if (int(threadIdx.x) % lanes == 0) {
    store_scale(call, call.place_of_scale((i / kOfRun<kBits>) >> log2_lanes, row), scale);
  }
  const Grid grid = grid_of(scale, Coding::kAsymmetric);
  Run<kBits> run;
  Rests rests;
#pragma unroll
  for (int p = 0; p < run.kEights; ++p) {
    const Floats<kEight> eight = eight_of(x, p);
    uint32_t codes[kEight];
    encode_each(coding, eight, grid, Noise{}, codes);
    if (call.errors != nullptr) rests.add(coding, eight, codes, grid, 0, kEight);
    run.put(codes, p);
  }
  if (call.errors != nullptr) errors.add(rests, grid, scale.scale);
  const uint32_t sign =
      Run<kBits>::filled(sign_of_packed(call.format, Coding::kAsymmetric)).words[0];
#pragma unroll
  for (int w = 0; w < 4; ++w) run.words[w] = (run.words[w] & grid.mask) ^ sign;
  return run;
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

// A run of groups of any size, of which `count` elements are in the row.
template <class T, class Coding, int kBits>
__device__ inline Run<kBits> round_measured(const QuantizePacked& call, const Coding& coding,
                                            const RowVector<T, kOfRun<kBits>>& x, int64_t row,
                                            int64_t i, int count, ErrorsOfThread& errors) {
  if (count <= 0) return Run<kBits>::filled(packed_padding(call.format));
  const uint32_t sign = sign_of_packed(call.format, Coding::kAsymmetric);
  constexpr uint32_t kMask = (1u << kBits) - 1;
  GroupAt group = GroupAt::of(call, coding, row, i);
  Run<kBits> run;
#pragma unroll
  for (int p = 0; p < run.kEights; ++p) {
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
    run.put(codes, p);
  }
  return run;
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
  const Pointer<Any> x = call.x.row<Any>(row);
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
template <class T, class Coding, int kBits, bool kMeasured>
__global__ void __launch_bounds__(kMostThreads, kBlocks<T, kMeasured>)
    rows_kernel(const __grid_constant__ QuantizePacked call, const Coding coding, int team,
                bool aligned) {
  constexpr int kRun = kOfRun<kBits>, kRuns = kOfThread / kRun;
  const int64_t row = blockIdx.x, padded = call.padded_length();
  const Pointer<T> x = call.x.row<T>(row);
  uint8_t* codes = call.codes + row * call.row_bytes;
  if constexpr (kMeasured) measure_row(call, coding, row, team);
  ErrorsOfThread errors;
  for (int64_t tile = 0; tile < padded; tile += int64_t(blockDim.x) * kOfThread) {
    RowVector<T, kRun> runs[kRuns];
    const auto place_of = [&](int k) {
      return tile + (k * int(blockDim.x) + int(threadIdx.x)) * kRun;
    };
    const auto count_of = [&](int64_t i) {
      return int(i + kRun < call.length ? kRun : call.length - i);
    };
#pragma unroll
    for (int k = 0; k < kRuns; ++k) {
      const int64_t i = place_of(k);
      if (i < call.length) runs[k] = fetch<kRun>(x, i, count_of(i), aligned);
    }
#pragma unroll
    for (int k = 0; k < kRuns; ++k) {
      const int64_t i = place_of(k);
      Run<kBits> run;
      if constexpr (kMeasured) {
        if (i >= padded) continue;
        run = round_measured<T, Coding, kBits>(call, coding, runs[k], row, i, count_of(i), errors);
      } else {
        run = round_in_lanes<T, Coding, kBits>(call, coding, runs[k], row, i, team, errors);
      }
      if (i < padded) run.store(codes + i * kBits / 8);
    }
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
int log2_lanes_of(const QuantizePacked& call, int64_t of_run) {
  int log2_lanes = 0;
  while ((of_run << log2_lanes) < call.group) ++log2_lanes;
  const bool is_whole = call.columns() <= 1 || of_run << log2_lanes == call.group;
  return is_whole && 1 << log2_lanes <= kWarp ? log2_lanes : -1;
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
  with_packed_coding(call.format, call.asymmetric, [&](const auto& coding, auto bits) {
    using Coding = std::remove_cvref_t<decltype(coding)>;
    constexpr int kBits = decltype(bits)::value;
    const int log2_lanes = log2_lanes_of(call, kOfRun<kBits>);
    const int team = log2_lanes < 0 ? team_of(call, threads) : log2_lanes;
    const auto launch = [&](auto kernel) {
      kernel<<<unsigned(call.rows), threads, 0, cudaStream_t(stream)>>>(call, coding, team,
                                                                        aligned);
    };
    if (!aligned || call.length % kOfRun<kBits> != 0) {
      return launch(rows_kernel<Any, Coding, kBits, true>);
    }
    with_storage_type(call.x.dtype, [&](auto storage) {
      using T = decltype(storage);
      launch(log2_lanes < 0 ? rows_kernel<T, Coding, kBits, true>
                            : rows_kernel<T, Coding, kBits, false>);
    });
  });
  cuda::check(cudaGetLastError(), kOp);
}

}  // namespace dsx
