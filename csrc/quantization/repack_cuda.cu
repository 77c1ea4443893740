// repack on CUDA: a thread makes the runs of a line, and threads beside it those of the rows beside
// that, as most files have the words of rows side by side.
#include <cuda_runtime.h>

#include <cstring>

#include "common/cuda/check.h"
#include "quantization/repack.h"

namespace dsx {
namespace {

constexpr const char* kOp = "repack_weight_";
constexpr int kThreads = 128;
constexpr int kRunsOfLine = int(kPackedLineBytes / kRunBytes);
constexpr int64_t kMostLines = 65535;  // of a launch, along the second dimension of its grid

// The code of an element of a row, which has number `nibble` in words across rows; `lane` are its
// words.
template <int kBits>
__device__ inline uint32_t code_of(const Repack& call, const uint32_t* lane, int64_t element,
                                   int nibble) {
  constexpr uint32_t kInWord = 32 / kBits;
  if (element < call.length && call.order != nullptr) element = call.order[element];
  if (uint64_t(element) >= uint64_t(call.length)) return packed_padding(call.format);
  const uint32_t number = call.across ? uint32_t(nibble) : uint32_t(element) % kInWord;
  const int64_t step = call.across ? element : uint32_t(element) / kInWord;
  const uint32_t code = lane[step * call.step_pitch] >> (kBits * number) & ((1u << kBits) - 1);
  return code ^ sign_of_packed(call.format, call.biased);
}

template <int kBits>
__global__ void __launch_bounds__(kThreads) repack_kernel(const __grid_constant__ Repack call) {
  const int64_t row = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= call.rows) return;
  const uint32_t* lane = call.words + (call.across ? row / kAcross : row) * call.lane_pitch;
  const int nibble = nibble_of_row(int(row % kAcross));
  const int64_t lines = call.row_bytes / kPackedLineBytes;
  for (int64_t line = blockIdx.y; line < lines; line += gridDim.y) {
    uint8_t* target = call.codes + row * call.row_bytes + line * kPackedLineBytes;
    for (int64_t run = line * kRunsOfLine; run < (line + 1) * kRunsOfLine; ++run) {
      uint32_t made[4] = {};
#pragma unroll
      for (int i = 0; i < 4 * 32 / kBits; ++i) {
        const int word = i % 4, step = i / 4;
        const int64_t element = run * (kRunBytes * 8 / kBits) + element_of_run(kBits, word, step);
        made[word] |= code_of<kBits>(call, lane, element, nibble) << (kBits * step);
      }
      if (reinterpret_cast<uintptr_t>(target) % kRunBytes == 0) {
        *reinterpret_cast<uint4*>(target) = uint4{made[0], made[1], made[2], made[3]};
      } else {
        memcpy(target, made, sizeof(made));
      }
      target += kRunBytes;
    }
  }
}

}  // namespace

void repack_cuda(const Repack& call, void* stream) {
  cuda::check(cudaPeekAtLastError(), kOp);  // of somebody before
  const int64_t lines = call.row_bytes / kPackedLineBytes;
  const dim3 blocks(unsigned(ceil_div(call.rows, kThreads)),
                    unsigned(lines < kMostLines ? lines : kMostLines));
  if (call.bits() == 4) {
    repack_kernel<4><<<blocks, kThreads, 0, cudaStream_t(stream)>>>(call);
  } else {
    repack_kernel<8><<<blocks, kThreads, 0, cudaStream_t(stream)>>>(call);
  }
  cuda::check(cudaGetLastError(), kOp);
}

}  // namespace dsx
