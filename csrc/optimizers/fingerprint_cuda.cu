// Fingerprints on CUDA: every warp has one block of one tensor, some rows at a time.
#include "optimizers/fingerprint.h"

#include <algorithm>

#include "common/cuda/check.h"
#include "common/cuda/launch.cuh"
#include "common/cuda/vector_io.cuh"

namespace dsx {
namespace {

#include "optimizers/fingerprint_math.inl"

constexpr const char* kOp = "fingerprints";
constexpr int kTensorsPerLaunch = 1024;
constexpr int kWarpSize = 32;
constexpr int kWarps = cuda::kThreads / kWarpSize;
constexpr int64_t kChunkBytes = kWarps * kBlockBytes;  // of a block of threads
constexpr int kWords = 4;                              // of each quarter of a row, in a lane
constexpr int kLanes = kQuarterWords / kWords;         // of a row
constexpr int kRowsAtATime = kWarpSize / kLanes;

using Words = cuda::Elements<uint32_t, kWords>;

struct FingerprintBatch {
  Bytes tensors[kTensorsPerLaunch];    // [count] of them
  int first_block[kTensorsPerLaunch];  // [count] of each tensor
  uint64_t* fingerprints;              // [count] added to
  int count;
};
static_assert(sizeof(FingerprintBatch) <= cuda::kMaxKernelParameterBytes);

int64_t chunks_of(const Bytes& tensor) { return cuda::chunks_of(tensor.bytes, kChunkBytes); }

// Of this lane's part of a block. load(place) is what lies that many bytes behind its begin.
template <class Load>
__device__ ColumnSums sums_of_lane(int64_t bytes, const Load& load) {
  const int lane = threadIdx.x % kWarpSize;
  const int first_row = lane / kLanes, first_word = lane % kLanes * kWords;
  uint32_t keys[4][kWords];
#pragma unroll
  for (int quarter = 0; quarter < 4; ++quarter) {
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      keys[quarter][k] = word_key(uint32_t(quarter * kQuarterWords + first_word + k));
    }
  }
  ColumnSums sums;
#pragma unroll 2  // so that what two rows need is asked for before the first is looked at
  for (int i = 0; i < kBlockRows; i += kRowsAtATime) {
    const int row = i + first_row;
    if (row * kRowBytes >= bytes) break;
    Words words[4];
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
      words[quarter] = load(row * kRowBytes + 4 * (quarter * kQuarterWords + first_word));
    }
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      uint32_t x[4];
#pragma unroll
      for (int quarter = 0; quarter < 4; ++quarter) {
        x[quarter] = words[quarter].lanes[k] + keys[quarter][k] + row_key(row);
      }
      sums.add(x[0], x[1], x[2], x[3]);
    }
  }
  return sums;
}

// The same for memory that can be read by Ts only; behind its end there are zeros.
template <class T>
__device__ ColumnSums sums_of_parts(const uint8_t* block, int64_t bytes) {
  return sums_of_lane(bytes, [&](int64_t place) {
    Words words{};
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
#pragma unroll
      for (int byte = 0; byte < 4; byte += sizeof(T)) {
        const int64_t at = place + 4 * k + byte;
        if (at < bytes) {
          words.lanes[k] |= uint32_t(*reinterpret_cast<const T*>(block + at)) << 8 * byte;
        }
      }
    }
    return words;
  });
}

__device__ ColumnSums sums_of_lane(const uint8_t* block, int64_t bytes) {
  if (bytes == kBlockBytes && cuda::is_aligned<kWords>(block, 4)) {
    return sums_of_lane(
        kBlockBytes, [&](int64_t place) { return *reinterpret_cast<const Words*>(block + place); });
  }
  const uint64_t multiple = reinterpret_cast<uintptr_t>(block) | uint64_t(bytes);
  if (multiple % 4 == 0) return sums_of_parts<uint32_t>(block, bytes);
  if (multiple % 2 == 0) return sums_of_parts<uint16_t>(block, bytes);
  return sums_of_parts<uint8_t>(block, bytes);
}

// Lane 0 has the sums of the warp.
__device__ ColumnSums sum_of_warp(ColumnSums sums) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    ColumnSums other;
    other.beside = __shfl_down_sync(0xffffffff, sums.beside, distance);
    other.across = __shfl_down_sync(0xffffffff, sums.across, distance);
    sums.add(other);
  }
  return sums;
}

__global__ void __launch_bounds__(cuda::kThreads)
    fingerprints_kernel(const __grid_constant__ FingerprintBatch batch) {
  const int index = cuda::tensor_of_block(batch.first_block, batch.count, blockIdx.x);
  const Bytes& tensor = batch.tensors[index];
  const int warp = threadIdx.x / kWarpSize;
  const int64_t block = int64_t(int(blockIdx.x) - batch.first_block[index]) * kWarps + warp;
  const int64_t begin = block * kBlockBytes;
  __shared__ uint64_t of_warps[kWarps];
  uint64_t bits = 0;
  if (begin < tensor.bytes) {
    const auto data = static_cast<const uint8_t*>(tensor.data) + begin;
    const ColumnSums sums =
        sum_of_warp(sums_of_lane(data, ::min(kBlockBytes, tensor.bytes - begin)));
    bits = sums.of_block(block);
    if (block == 0) bits += mixed(uint64_t(tensor.bytes));
  }
  if (threadIdx.x % kWarpSize == 0) of_warps[warp] = bits;
  __syncthreads();
  if (threadIdx.x != 0) return;
  bits = 0;
  for (uint64_t of_warp : of_warps) bits += of_warp;
  // The order in which blocks come makes no difference.
  atomicAdd(reinterpret_cast<unsigned long long*>(batch.fingerprints + index), bits);
}

}  // namespace

void fingerprints_cuda(const Bytes* tensors, int64_t count, uint64_t* fingerprints, void* stream) {
  cuda::check(cudaPeekAtLastError(), kOp);  // of somebody before
  cuda::check(
      cudaMemsetAsync(fingerprints, 0, size_t(count) * sizeof(uint64_t), cudaStream_t(stream)),
      kOp);
  FingerprintBatch batch;
  for (int64_t first = 0; first < count; first += kTensorsPerLaunch) {
    batch.fingerprints = fingerprints + first;
    const int64_t blocks = cuda::fill_launch(
        batch, std::min<int64_t>(kTensorsPerLaunch, count - first), [&](int64_t i) {
      return tensors[first + i];
    }, [&](int64_t i) { return chunks_of(tensors[first + i]); });
    if (blocks == 0) continue;  // CUDA rejects an empty grid
    fingerprints_kernel<<<unsigned(blocks), cuda::kThreads, 0, cudaStream_t(stream)>>>(batch);
    cuda::check(cudaGetLastError(), kOp);
  }
}

}  // namespace dsx
