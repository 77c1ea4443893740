// Optimizer steps on CUDA: a small kernel advances the steps of the tensors and works out what
// depends on them, then every block of the main kernel updates one chunk of one tensor. For the
// *_cuda.cu of an optimizer, which includes the Rule's formula before.
#pragma once

#include <algorithm>
#include <vector>

#include "common/cuda/check.h"
#include "common/cuda/launch.cuh"
#include "common/cuda/reduce.cuh"
#include "optimizers/step.h"
#include "optimizers/storage_cuda.cuh"

namespace dsx::cuda {

constexpr int kStepsPerLaunch = 1000;

// Here codes have loops of their own beside whole weights, too: twice as fast as with Any.
#define DSX_STEP_STORAGE_TYPES_ON_CUDA(APPLY) \
  APPLY(BFloat16, BFloat16, Codes)            \
  APPLY(float, float, Codes)                  \
  DSX_STEP_STORAGE_TYPES(APPLY)

// The tensors of a launch travel as kernel parameters: no copy to the device to wait for, and a
// CUDA graph captures them.
template <class Rule>
struct StepsOfLaunch {
  StepCall<Rule> call;
  float* steps[kStepsPerLaunch];  // [count] of them
  NoiseKey noise[kStepsPerLaunch];
  Prepared<Rule>* prepared;  // [count] written
  int count;
};

template <class Rule>
struct TensorsOfLaunch {
  static constexpr int kMost = int((kMaxKernelParameterBytes - sizeof(StepCall<Rule>) - 32) /
                                   (sizeof(StepTensor<Rule::kStates>) + sizeof(int)));
  StepCall<Rule> call;
  StepTensor<Rule::kStates> tensors[kMost];  // [count] of them
  int first_block[kMost];                    // [count] of each tensor
  const Prepared<Rule>* prepared;            // [count] device memory
  double* squares;                           // [blocks, kMeasured] written by a rule that measures
  int count;
};

template <class Rule>
__global__ void advance_steps(const __grid_constant__ StepsOfLaunch<Rule> launch) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= launch.count || launch.call.found_inf.value() != 0) return;
  constexpr Pass pass = pass_of<Rule>();
  float step = 0;
  if constexpr (pass != Pass::measure) step = *launch.steps[i];
  if constexpr (advances_steps(pass)) *launch.steps[i] = ++step;
  launch.prepared[i] = prepare(launch.call, i, launch.noise[i], step);
}

// Adds the squares of the first `count` lanes, which are exact in double.
template <int kCount>
__device__ inline void add_squares(const Floats<kCount>& values, int count, double& sum) {
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    if (k < count) sum += double(values.lanes[k]) * double(values.lanes[k]);
  }
}

inline int64_t blocks_of(const StepTypes& types, int64_t n) {
  return chunks_of(n, types.state == Dtype::codes ? kCodedChunk : kChunk);
}

// How many strides of a block's loop are in shared memory: the one at hand, and those on their way.
constexpr int kFetched = 2;

// Blocks that a multiprocessor holds at once, which bounds the registers of a thread. Measured on
// an H200: the more the better, but for float state, and until registers are spilled in the loop.
template <class Grad, class State>
constexpr int kResidentBlocks = std::is_same_v<State, float>    ? 1
                                : !std::is_same_v<State, Codes> ? 4
                                : std::is_same_v<Grad, Any>     ? 2
                                                                : 5;

template <class Rule, class Param, class Grad, class State>
__global__ void __launch_bounds__(kThreads, (kResidentBlocks<Grad, State>))
    step_kernel(const __grid_constant__ TensorsOfLaunch<Rule> launch) {
  constexpr Pass pass = pass_of<Rule>();
  const bool skip = launch.call.found_inf.value() != 0;
  if (skip && !measures(pass)) return;
  // Elements of a thread's access: 16 bytes of the widest of the types; a warp takes whole blocks.
  constexpr bool kCoded = std::is_same_v<State, Codes>;
  constexpr bool kNarrow = std::is_same_v<Param, BFloat16> && std::is_same_v<Grad, BFloat16>;
  constexpr int kCount = kCoded || kNarrow ? 8 : 4;
  const int index = tensor_of_block(launch.first_block, launch.count, blockIdx.x);
  const StepTypes& types = launch.call.types;
  const StepTensor<Rule::kStates>& tensor = launch.tensors[index];
  // From here on all addresses are those of this block's chunk, and indices count from its start.
  constexpr int64_t kMine = kCoded ? kCodedChunk : kChunk;
  const int64_t begin = int64_t(int(blockIdx.x) - launch.first_block[index]) * kMine;
  const int end = skip ? 0 : int(::min(kMine, tensor.n - begin));
  const typename Rule::Step step = constants_of_loop<Rule, Grad>(launch.prepared[index].step);
  using Memory = Operands<Rule, Param, Grad, State>;
  const Memory far(types, tensor, launch.prepared[index].noise, begin);
  [[maybe_unused]] double squares[kMeasured] = {};

  // Reads elements from `at` on there, and writes them from i on.
  const auto visit = [&]<Access access>(const Memory& from, int at, int i, int count) {
    Floats<kCount> grad(0.0f);
    if constexpr (reads_grads(pass)) grad = load<access, kCount>(from.grads + at, count);
    auto param = from.parameter.template load<access, kCount>(at, count);
    Floats<kCount> values[Rule::kStates];
    from.states.template load<access>(at, i, count, values);
    update(step, grad, param, values);
    if constexpr (writes_params(pass)) far.parameter.template store<access>(i, param, count);
    if constexpr (writes_states(pass)) far.states.template store<access>(i, count, values);
    if constexpr (measures(pass)) {
      Floats<kCount> measured[kMeasured];
      measure(step, grad, param, values, measured);
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
  if (is_aligned<kCount>(types, tensor)) {
    if constexpr (kCoded && !std::is_same_v<Grad, Any>) {
      // There is much to compute and no register to spare: what comes next is fetched into shared
      // memory meanwhile. A warp reads only what its own threads have put there.
      constexpr Access access = sizeof(Grad) > 2 ? Access::halves : Access::vector;
      constexpr int kRoom = kFetched * kStride;
      __shared__ alignas(16) char room[Memory::kBytes * kRoom];
      __shared__ float scales[StatesOfLoop<Rule, Grad>::kCount][kCodedChunk / kCodesBlock];
      static_assert((kRoom & (kRoom - 1)) == 0);
      const Memory near(room, kRoom, scales);
      const int end_of_whole = end & -int(kCodesBlock);
      const int mine = access == Access::halves ? i - offset / 2 : i;
      int ahead = mine;
      const auto fetch_next = [&] {
        if (ahead < end_of_whole)
          far.template fetch_to<access, kCount>(near, ahead & (kRoom - 1), ahead);
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
        visit.template operator()<access>(near, k & (kRoom - 1), k, kCount);
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
void launch_advance_steps(const StepCall<Rule>& call, const StepTensor<Rule::kStates>* tensors,
                          int64_t count, Prepared<Rule>* prepared, cudaStream_t stream) {
  StepsOfLaunch<Rule> launch;
  static_assert(sizeof(launch) <= kMaxKernelParameterBytes);
  launch.call = call;
  for (int64_t first = 0; first < count; first += kStepsPerLaunch) {
    launch.count = int(std::min<int64_t>(kStepsPerLaunch, count - first));
    launch.prepared = prepared + first;
    if (call.coefficients != nullptr) launch.call.coefficients = call.coefficients + first;
    for (int i = 0; i < launch.count; ++i) {
      launch.steps[i] = tensors[first + i].step;
      launch.noise[i] = tensors[first + i].noise;
    }
    const int blocks = int(ceil_div(launch.count, kThreads));
    advance_steps<<<blocks, kThreads, 0, stream>>>(launch);
    check(cudaGetLastError(), Rule::kOp);
  }
}

template <class Rule, class Param, class Grad, class State>
void launch_step(const StepCall<Rule>& call, const StepTensor<Rule::kStates>* tensors,
                 int64_t count, const Prepared<Rule>* prepared, double* squares_of_blocks,
                 cudaStream_t stream) {
  using Launch = TensorsOfLaunch<Rule>;
  Launch launch;
  static_assert(sizeof(launch) <= kMaxKernelParameterBytes);
  launch.call = call;
  launch.squares = squares_of_blocks;
  for (int64_t first = 0; first < count; first += Launch::kMost) {
    launch.count = int(std::min<int64_t>(Launch::kMost, count - first));
    launch.prepared = prepared + first;
    int64_t blocks = 0;
    for (int i = 0; i < launch.count; ++i) {
      launch.tensors[i] = tensors[first + i];
      launch.first_block[i] = int(blocks);
      blocks += blocks_of(call.types, launch.tensors[i].n);
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
                Prepared<Rule>* prepared, void* stream, double* squares_of_blocks = nullptr) {
  check(cudaPeekAtLastError(), Rule::kOp);  // of somebody before: nothing is modified yet
  launch_advance_steps(call, tensors, count, prepared, cudaStream_t(stream));
#define DSX_TRY_TYPES(Param, Grad, State)                                                  \
  if (takes<Rule, Param, Grad, State>(call.types)) {                                       \
    return launch_step<Rule, Param, Grad, State>(call, tensors, count, prepared,           \
                                                 squares_of_blocks, cudaStream_t(stream)); \
  }
  DSX_STEP_STORAGE_TYPES_ON_CUDA(DSX_TRY_TYPES)
#undef DSX_TRY_TYPES
}

// How many doubles of device memory queue_measure works in, at the most.
template <int kStates>
int64_t doubles_of_blocks(const StepTensor<kStates>* tensors, int64_t count) {
  int64_t blocks = 0;
  for (int64_t i = 0; i < count; ++i) blocks += chunks_of(tensors[i].n);
  return blocks * kMeasured;
}

// The same for a rule that measures: queues the sums of squares of each tensor as well.
template <class Rule>
void queue_measure(const StepCall<Rule>& call, const StepTensor<Rule::kStates>* tensors,
                   int64_t count, Prepared<Rule>* prepared,
                   double* workspace,  // [doubles_of_blocks()] device memory
                   double* squares,    // [count, kMeasured] device memory, written
                   void* stream) {
  queue_step(call, tensors, count, prepared, stream, workspace);
  std::vector<int64_t> first_block(size_t(count) + 1);
  for (int64_t i = 0; i < count; ++i) {
    first_block[size_t(i) + 1] = first_block[size_t(i)] + blocks_of(call.types, tensors[i].n);
  }
  launch_add_blocks<kMeasured>(first_block.data(), count, workspace, squares, cudaStream_t(stream),
                               Rule::kOp);
}

}  // namespace dsx::cuda
