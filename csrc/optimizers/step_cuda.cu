// The CUDA kernels of one optimizer: of DSX_RULE, and of DSX_MEASURING_RULE if it has two, which
// DSX_RULE_HEADER declares and DSX_FORMULA has the formulas of. The row in op_builder/registry.py
// defines them. A small kernel advances the step counts of the tensors and works out what depends
// on them, then every block of the main kernel updates one chunk of one tensor.
#include <algorithm>

#include "optimizers/chunks.h"
#include "common/cuda/check.h"
#include "common/cuda/launch.cuh"
#include "optimizers/reduce_cuda.cuh"
#include "optimizers/skipped.h"
#include DSX_RULE_HEADER

namespace dsx {
#include DSX_FORMULA
}

#include "optimizers/storage_cuda.cuh"

namespace dsx::cuda {

constexpr int kCountsPerLaunch = 800;

// Here codes have loops of their own beside whole weights, too: twice as fast as with Any.
#define DSX_STEP_STORAGE_TYPES_ON_CUDA(APPLY) \
  APPLY(BFloat16, BFloat16, Codes)            \
  APPLY(float, float, Codes)                  \
  DSX_STEP_STORAGE_TYPES(APPLY)

// The tensors of a launch travel as kernel parameters: no copy to the device to wait for, and a
// CUDA graph captures them.
template <class Rule>
struct CountsOfLaunch {
  StepCall<Rule> call;
  const float* sources[kCountsPerLaunch];  // [count] step counts
  float* targets[kCountsPerLaunch];        // [count]
  NoiseKey noise[kCountsPerLaunch];        // [count]
  TensorConstants<Rule>* constants;        // [count] written
  int count;
};

template <int kStates>
struct LaunchTensor {
  StepMemory<kStates> memory;
  void* grad;
  int64_t n;
};

template <class Rule>
struct TensorsOfLaunch {
  static constexpr int kMost = int((kMaxKernelParameterBytes - sizeof(StepCall<Rule>) - 32) /
                                   (sizeof(LaunchTensor<Rule::kStates>) + sizeof(int) + 1));
  StepCall<Rule> call;
  // [count] for the accesses of a thread. At the front: with a byte beyond 32 KiB nvcc 13.0 makes
  // an index and a negative offset of it, which an H200 reads as 0.
  bool aligned[kMost];
  LaunchTensor<Rule::kStates> tensors[kMost];  // [count]; not in place: and the targets of each
  int first_block[kMost];                      // [count] of each tensor
  const TensorConstants<Rule>* constants;      // [count] device memory
  double* squares;                             // [blocks, kMeasured] written if the rule measures
  int count;
};

template <class Rule>
__global__ void advance_step_counts(const __grid_constant__ CountsOfLaunch<Rule> launch) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= launch.count || launch.call.found_inf.value() != 0) return;
  constexpr Pass pass = pass_of<Rule>();
  float step_count = 0;
  if constexpr (reads_step_counts(pass)) step_count = *launch.sources[i];
  if constexpr (advances_step_counts(pass)) *launch.targets[i] = ++step_count;
  launch.constants[i] = constants_of(launch.call, i, launch.noise[i], step_count);
}

// Adds the squares of the first `count` lanes, which are exact in double.
template <int kCount>
__device__ inline void add_squares(const Floats<kCount>& values, int count, double& sum) {
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    if (k < count) sum += double(values.lanes[k]) * double(values.lanes[k]);
  }
}

inline int64_t chunks_of_tensor(const StepTypes& types, int64_t n) {
  return chunks_of(n, types.state == Format::codes ? kCodedChunk : kChunk);
}

// How many strides of a block's loop are in shared memory: the one at hand, and those on their way.
constexpr int kFetched = 2;

// Elements of a thread's access: 16 bytes of the widest of the types; a warp takes whole blocks.
template <class Param, class Grad, class State>
constexpr int kElements = std::is_same_v<State, Codes> || (std::is_same_v<Param, BFloat16> &&
                                                           std::is_same_v<Grad, BFloat16>)
                              ? 8
                              : 4;

// Blocks that a multiprocessor holds at once, which bounds the registers of a thread. Measured on
// an H200: the more the better, but for float state, and until registers are spilled in the loop.
template <class Grad, class State>
constexpr int kResidentBlocks = std::is_same_v<State, float>    ? 3
                                : !std::is_same_v<State, Codes> ? 4
                                : std::is_same_v<Grad, Any>     ? 2
                                                                : 5;

template <class Rule, class Param, class Grad, class State>
__global__ void __launch_bounds__(kThreads, (kResidentBlocks<Grad, State>))
    step_kernel(const __grid_constant__ TensorsOfLaunch<Rule> launch) {
  constexpr Pass pass = pass_of<Rule>();
  const bool skip = launch.call.found_inf.value() != 0;
  if (skip && !measures(pass)) return;
  constexpr bool kCoded = std::is_same_v<State, Codes>;
  constexpr int kCount = kElements<Param, Grad, State>;
  const int index = tensor_of_block(launch.first_block, launch.count, blockIdx.x);
  const StepTypes& types = launch.call.types;
  const LaunchTensor<Rule::kStates>& tensor = launch.tensors[index];
  const StepMemory<Rule::kStates>& target =
      launch.tensors[launch.call.in_place ? index : index + launch.count].memory;
  // From here on all addresses are those of this block's chunk, and indices count from its start.
  constexpr int64_t kMine = kCoded ? kCodedChunk : kChunk;
  const int64_t begin = int64_t(int(blockIdx.x) - launch.first_block[index]) * kMine;
  const int end = skip ? 0 : int(::min(kMine, tensor.n - begin));
  const typename Rule::Constants constants =
      constants_of_loop<Rule, Grad>(launch.constants[index].constants);
  using Memory = Operands<Rule, Param, Grad, State>;
  const Noise& noise = launch.constants[index].noise;
  const Memory far(types, tensor.memory, tensor.grad, noise, begin);
  const Parameter<Param> new_weights(types, target, begin);
  const States<Rule, State, Grad> new_states(types, target, noise, begin);
  [[maybe_unused]] double squares[kMeasured] = {};

  // Reads elements from `at` on there, and writes them from i on.
  const auto visit = [&]<Access access>(const Memory& from, int at, int i, int count) {
    Floats<kCount> grad(0.0f);
    if constexpr (reads_grads(pass)) grad = load<access, kCount>(from.grads + at, count);
    auto param = from.parameter.template load<access, kCount>(at, count);
    Floats<kCount> values[Rule::kStates];
    from.states.template load<access>(at, i, count, values);
    update(constants, grad, param, values);
    if constexpr (writes_weights(pass)) new_weights.template store<access>(i, param, count);
    if constexpr (writes_states(pass)) new_states.template store<access>(i, count, values);
    if constexpr (measures(pass)) {
      Floats<kCount> measured[kMeasured];
      measure(constants, grad, param, values, measured);
#pragma unroll
      for (int j = 0; j < kMeasured; ++j) add_squares(measured[j], count, squares[j]);
    }
  };
  // What has to stay together: a thread's elements, or with codes those of a warp, which finds the
  // scale of its block together, so that all its threads go on while one of them has elements.
  const int offset = kCoded ? int(threadIdx.x) % 32 * kCount : 0;
  constexpr int kTogether = kCoded ? int(kCodesBlock) : kCount;
  constexpr int kStride = kThreads * kCount;
  int i = int(threadIdx.x) * kCount;
  if (launch.aligned[index]) {
    if constexpr (kCoded && !std::is_same_v<Grad, Any>) {
      // There is much to compute and no register to spare: what comes next is fetched into shared
      // memory meanwhile. A warp reads only what its own threads have put there.
      constexpr Access access = sizeof(Grad) > 2 ? Access::halves : Access::vector;
      constexpr int kFetchedElements = kFetched * kStride;
      __shared__ alignas(16) char fetched[Memory::kBytes * kFetchedElements];
      __shared__ float scales[StatesOfLoop<Rule, Grad>::kCount][kCodedChunk / kCodesBlock];
      static_assert((kFetchedElements & (kFetchedElements - 1)) == 0);
      const Memory near(fetched, kFetchedElements, scales);
      const int end_of_whole = end & -int(kCodesBlock);
      const int mine = access == Access::halves ? i - offset / 2 : i;
      int ahead = mine;
      const auto fetch_next = [&] {
        if (ahead < end_of_whole)
          far.template fetch_to<access, kCount>(near, ahead & (kFetchedElements - 1), ahead);
        end_fetches();
        ahead += kStride;
      };
      for (int k = 1; k < kFetched; ++k) fetch_next();
      far.states.copy_scales_to(near.states, end);
      for (int k = mine; k < end_of_whole; k += kStride) {
        __syncwarp();  // all have read what is overwritten now
        fetch_next();
        wait_for_fetches<kFetched - 1>();
        __syncwarp();  // all see what each has fetched
        visit.template operator()<access>(near, k & (kFetchedElements - 1), k, kCount);
        i += kStride;
      }
    } else {
      // Twice the loads in flight: 7 % faster when all types have 16 bits.
      constexpr int kUnroll = kCoded ? 1 : 2;
#pragma unroll(kUnroll)
      for (; i - offset + kTogether <= end; i += kStride) {
        visit.template operator()<Access::vector>(far, i, i, kCount);
      }
    }
  }
  for (; i - offset < end; i += kStride) {
    const int left = end - i;
    visit.template operator()<Access::single>(far, i, i,
                                              left < 0        ? 0
                                              : left < kCount ? left
                                                              : kCount);
  }
  if constexpr (measures(pass)) {
    store_block_sums(squares, launch.squares + int64_t(blockIdx.x) * kMeasured);
  }
}

template <class Rule>
void launch_advance_step_counts(const StepCall<Rule>& call,
                                const StepTensor<Rule::kStates>* tensors, int64_t count,
                                TensorConstants<Rule>* constants, cudaStream_t stream) {
  CountsOfLaunch<Rule> launch;
  static_assert(sizeof(launch) <= kMaxKernelParameterBytes);
  launch.call = call;
  for (int64_t first = 0; first < count; first += kCountsPerLaunch) {
    launch.count = int(std::min<int64_t>(kCountsPerLaunch, count - first));
    launch.constants = constants + first;
    if (call.coefficients != nullptr) launch.call.coefficients = call.coefficients + first;
    for (int i = 0; i < launch.count; ++i) {
      launch.sources[i] = tensors[first + i].source.step_count;
      launch.targets[i] = tensors[first + i].target.step_count;
      launch.noise[i] = tensors[first + i].noise;
    }
    const int blocks = int(ceil_div(launch.count, kThreads));
    advance_step_counts<<<blocks, kThreads, 0, stream>>>(launch);
    check(cudaGetLastError(), Rule::kOp);
  }
}

template <class Rule, class Param, class Grad, class State>
void launch_step(const StepCall<Rule>& call, const StepTensor<Rule::kStates>* tensors,
                 int64_t count, const TensorConstants<Rule>* constants, double* squares_of_blocks,
                 cudaStream_t stream) {
  using Launch = TensorsOfLaunch<Rule>;
  Launch launch;
  static_assert(sizeof(launch) <= kMaxKernelParameterBytes);
  launch.call = call;
  launch.squares = squares_of_blocks;
  const int most = call.in_place ? Launch::kMost : Launch::kMost / 2;
  for (int64_t first = 0; first < count; first += most) {
    launch.constants = constants + first;
    const int64_t blocks = fill_launch(launch, std::min<int64_t>(most, count - first),
                                       [&](int64_t i) -> LaunchTensor<Rule::kStates> {
      const auto& tensor = tensors[first + i];
      return {tensor.source, tensor.grad, tensor.n};
    }, [&](int64_t i) { return chunks_of_tensor(call.types, tensors[first + i].n); });
    for (int i = 0; i < launch.count; ++i) {
      const auto& [source, target, grad, noise, n] = tensors[first + i];
      constexpr int kCount = kElements<Param, Grad, State>;
      launch.aligned[i] = is_aligned<kCount>(call.types, source) &&
                          is_aligned<kCount>(call.types, target) &&
                          is_aligned<kCount>(grad, bytes_of(call.types.grad));
      if (!call.in_place) launch.tensors[launch.count + i].memory = target;
    }
    if (blocks == 0) continue;  // CUDA rejects an empty grid
    step_kernel<Rule, Param, Grad, State><<<unsigned(blocks), kThreads, 0, stream>>>(launch);
    check(cudaGetLastError(), Rule::kOp);
    if constexpr (measures(pass_of<Rule>())) launch.squares += blocks * kMeasured;
  }
}

// Queues the step of all tensors on the stream. A rule that measures has each block leave its sums.
template <class Rule>
void queue_step(const StepCall<Rule>& call, const StepTensor<Rule::kStates>* tensors, int64_t count,
                TensorConstants<Rule>* constants, double* squares_of_blocks, cudaStream_t stream) {
  check(cudaPeekAtLastError(), Rule::kOp);  // of somebody before: nothing is modified yet
  launch_advance_step_counts(call, tensors, count, constants, stream);
#define DSX_TRY_TYPES(Param, Grad, State)                                         \
  if (takes<Rule, Param, Grad, State>(call.types)) {                              \
    return launch_step<Rule, Param, Grad, State>(call, tensors, count, constants, \
                                                 squares_of_blocks, stream);      \
  }
  DSX_STEP_STORAGE_TYPES_ON_CUDA(DSX_TRY_TYPES)
#undef DSX_TRY_TYPES
}

constexpr int kCopiesPerLaunch = 1100;

struct CopiesOfLaunch {
  Scalar found_inf;
  MemoryCopy tensors[kCopiesPerLaunch];  // [count]
  int first_block[kCopiesPerLaunch];     // [count] of each
  int count;
};
static_assert(sizeof(CopiesOfLaunch) <= kMaxKernelParameterBytes);

constexpr int64_t kCopiedChunk = 65536;  // bytes of a block

__global__ void __launch_bounds__(kThreads)
    copy_if_skipped(const __grid_constant__ CopiesOfLaunch launch) {
  if (launch.found_inf.value() == 0) return;
  const int index = tensor_of_block(launch.first_block, launch.count, blockIdx.x);
  const MemoryCopy& copy = launch.tensors[index];
  const int64_t begin = int64_t(int(blockIdx.x) - launch.first_block[index]) * kCopiedChunk;
  const char* source = static_cast<const char*>(copy.source) + begin;
  char* target = static_cast<char*>(copy.target) + begin;
  const int n = int(::min(kCopiedChunk, copy.bytes - begin));
  int done = 0;
  if ((reinterpret_cast<uintptr_t>(source) | reinterpret_cast<uintptr_t>(target)) % 16 == 0) {
    done = n / 16 * 16;
    for (int i = int(threadIdx.x) * 16; i < done; i += kThreads * 16) {
      *reinterpret_cast<uint4*>(target + i) = *reinterpret_cast<const uint4*>(source + i);
    }
  }
  for (int i = done + int(threadIdx.x); i < n; i += kThreads) target[i] = source[i];
}

}  // namespace dsx::cuda

namespace dsx {

template <class Rule>
void step_cuda(const StepCall<Rule>& call, const StepTensor<Rule::kStates>* tensors, int64_t count,
               TensorConstants<Rule>* constants, void* stream) {
  cuda::queue_step(call, tensors, count, constants, nullptr, cudaStream_t(stream));
}

template <class Rule>
void measure_cuda(const StepCall<Rule>& call, const StepTensor<Rule::kStates>* tensors,
                  int64_t count, TensorConstants<Rule>* constants, double* workspace,
                  double* squares, void* stream) {
  cuda::queue_step(call, tensors, count, constants, workspace, cudaStream_t(stream));
  const std::vector<int64_t> first_chunk = begins_of(
      size_t(count), [&](size_t i) { return cuda::chunks_of_tensor(call.types, tensors[i].n); });
  cuda::launch_add_blocks<kMeasured>(first_chunk.data(), count, workspace, squares,
                                     cudaStream_t(stream), Rule::kOp);
}

template <class Rule>
int64_t measure_cuda_workspace(const StepTensor<Rule::kStates>* tensors, int64_t count) {
  int64_t chunks = 0;
  for (int64_t i = 0; i < count; ++i) chunks += cuda::chunks_of(tensors[i].n);
  return chunks * kMeasured;
}

void copy_if_skipped_cuda(const Scalar& found_inf, const std::vector<MemoryCopy>& copies,
                          const char* op, void* stream) {
  cuda::CopiesOfLaunch launch;
  launch.found_inf = found_inf;
  const int64_t count = int64_t(copies.size());
  for (int64_t first = 0; first < count; first += cuda::kCopiesPerLaunch) {
    const int64_t blocks = cuda::fill_launch(
        launch, std::min<int64_t>(cuda::kCopiesPerLaunch, count - first), [&](int64_t i) {
      return copies[size_t(first + i)];
    }, [&](int64_t i) { return ceil_div(copies[size_t(first + i)].bytes, cuda::kCopiedChunk); });
    cuda::copy_if_skipped<<<unsigned(blocks), cuda::kThreads, 0, cudaStream_t(stream)>>>(launch);
    cuda::check(cudaGetLastError(), op);
  }
}

template void step_cuda(const StepCall<DSX_RULE>&, const StepTensor<DSX_RULE::kStates>*, int64_t,
                        TensorConstants<DSX_RULE>*, void*);
#ifdef DSX_MEASURING_RULE
using Measuring = DSX_MEASURING_RULE;
template void measure_cuda(const StepCall<Measuring>&, const StepTensor<Measuring::kStates>*,
                           int64_t, TensorConstants<Measuring>*, double*, double*, void*);
template int64_t measure_cuda_workspace<Measuring>(const StepTensor<Measuring::kStates>*, int64_t);
#endif

}  // namespace dsx
