// moe_route on CUDA: a warp for each token, whose lane l has the experts l, l + 32, l + 64 ...
#include "moe/route.h"

#include "common/cuda/chain.cuh"
#include "common/cuda/convert.cuh"
#include "common/cuda/floats.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/vector_io.cuh"
#include "common/cuda/warp.cuh"
#include "moe/assign_in_block_cuda.cuh"

namespace dsx {

#include "moe/route_math.inl"

namespace {

using cuda::Floats;

constexpr int kLanes = 32, kWarps = 8;  // of a warp; of a block

__device__ int lane_of_thread() { return int(threadIdx.x) % kLanes; }
__device__ int warp_of_thread() { return int(threadIdx.x) / kLanes; }

// The sum over the experts, in a fixed order; every lane has it.
template <int kPer>
__device__ float sum_over_experts(const Floats<kPer>& values) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kPer; ++i) sum += values.lanes[i];
  return cuda::sum_of_warp(sum);
}

// What an expert has, for all lanes; of what is no expert's number, anything.
template <int kPer>
__device__ float value_of(const Floats<kPer>& values, int64_t expert) {
  float mine = 0;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    if (expert / kLanes == i) mine = values.lanes[i];
  }
  return __shfl_sync(0xffffffff, mine, int(expert % kLanes));
}

template <int kPer, class T>
__device__ Floats<kPer> read_row(const T* row, int64_t n) {
  Floats<kPer> values;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int expert = lane_of_thread() + i * kLanes;
    values.lanes[i] = expert < n ? cuda::widen(row[expert]) : -INFINITY;
  }
  return values;
}

template <int kPer>
__device__ Floats<kPer> read_row(const Pointer<Any>& row, int64_t n) {
  switch (row.dtype) {
    case Dtype::bfloat16: return read_row<kPer>(static_cast<const BFloat16*>(row.address), n);
    case Dtype::float16: return read_row<kPer>(static_cast<const Half*>(row.address), n);
    case Dtype::float32: return read_row<kPer>(static_cast<const float*>(row.address), n);
  }
  __builtin_unreachable();
}

// What is known of all experts for a token. Those that there are not have the logit -inf.
template <int kPer>
struct ExpertScores {
  Floats<kPer> logits, probabilities, sigmoids;
  float log_of_sum, sum_of_sigmoids = 1;

  __device__ ExpertScores(const RouteOptions& options, const Pointer<Any>& row)
      : logits(read_row<kPer>(row, options.experts)) {
    float largest = -INFINITY;  // not counting NaN
#pragma unroll
    for (int i = 0; i < kPer; ++i) largest = ::fmaxf(largest, logits.lanes[i]);
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
      largest = ::fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, distance));
    }
    const float shift = largest == -INFINITY ? 0.0f : largest;
    probabilities = exp(logits - Floats<kPer>(shift));
    const float sum = sum_over_experts(probabilities);
    log_of_sum = shift + ::logf(sum);
    probabilities = probabilities * Floats<kPer>(1.0f / sum);
    if (options.score != Score::sigmoid) return;
    sigmoids = sigmoid(logits);
    sum_of_sigmoids = sum_over_experts(sigmoids) + kLeastSum;
  }

  __device__ const Floats<kPer>& of(Score score) const {
    return score == Score::softmax ? probabilities : score == Score::sigmoid ? sigmoids : logits;
  }
};

// Numbers in the order in which they are taken; 0 for what is not to be taken, or no longer.
template <int kPer>
struct Ranks {
  uint32_t ranks[kPer];

  __device__ Ranks(const Floats<kPer>& values, int64_t n) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      ranks[i] = lane_of_thread() + i * kLanes < n ? rank_of(values.lanes[i]) : 0;
    }
  }

  // Where the largest is, of equal ones the first; the same for all lanes.
  __device__ int take() {
    uint32_t mine = 0;
    int at = 0;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (ranks[i] > mine) {
        mine = ranks[i];
        at = i;
      }
    }
    const uint32_t largest = cuda::max_of_warp(mine);
    const uint32_t backwards = mine == largest ? ~uint32_t(lane_of_thread() + at * kLanes) : 0;
    const int taken = int(~cuda::max_of_warp(backwards));
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (lane_of_thread() + i * kLanes == taken) ranks[i] = 0;
    }
    return taken;
  }
};

// What groups are chosen by: the best expert of each, or the sum of the two best.
template <int kPer>
__device__ Floats<kPer> values_of_groups(const Floats<kPer>& values, int groups, int length,
                                         bool of_two) {
  Floats<kPer> found = 0.0f;
  for (int g = 0; g < groups; ++g) {
    Ranks<kPer> inside(values, int64_t(groups) * length);
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if ((lane_of_thread() + i * kLanes) / length != g) inside.ranks[i] = 0;
    }
    float value = value_of(values, inside.take());
    if (of_two) value += value_of(values, inside.take());
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (lane_of_thread() + i * kLanes == g) found.lanes[i] = value;
    }
  }
  return found;
}

// What a token chooses from.
template <int kPer>
__device__ Ranks<kPer> candidates_of(const Route& call, const ExpertScores<kPer>& scores) {
  const RouteOptions& options = call.options;
  const bool is_sigmoid = options.score == Score::sigmoid;
  const int64_t n = options.experts;
  Floats<kPer> values = scores.logits;  // in the same order as their probabilities, or sigmoids
  if (call.bias.is_present()) {
    values = scores.of(options.score) + read_row<kPer>(call.bias.row<Any>(0), n);
  }
  Ranks<kPer> experts(values, n);
  if (call.groups == 1) return experts;
  const int length = int(n / call.groups);
  if (is_sigmoid && !call.bias.is_present()) values = scores.sigmoids;
  const bool of_two = is_sigmoid && length > 1;
  Ranks<kPer> groups(values_of_groups(values, int(call.groups), length, of_two), call.groups);
  uint32_t kept = 0;  // a bit for each of the lane's experts
  for (int taken = 0; taken < call.topk_groups; ++taken) {
    const int group = groups.take();
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      kept |= uint32_t((lane_of_thread() + i * kLanes) / length == group) << i;
    }
  }
#pragma unroll
  for (int i = 0; i < kPer; ++i) experts.ranks[i] = kept >> i & 1 ? experts.ranks[i] : 0;
  return experts;
}

// Choices and weights: lane l writes those number l, l + 32 ..., first as they are before they are
// normalized, and reads them again itself.
template <int kPer>
__device__ void choose(const Route& call, int64_t token, const ExpertScores<kPer>& scores) {
  const RouteOptions& options = call.options;
  const int lane = lane_of_thread(), k = int(options.k);
  int64_t* chosen = call.chosen + token * k;
  float* weights = call.weights + token * k;
  Ranks<kPer> candidates = candidates_of(call, scores);
  float largest = -INFINITY, sum = 0;
  for (int j = 0; j < k; ++j) {
    const int expert = candidates.take();
    const float weight = value_of(scores.of(options.score), expert);
    largest = ::fmaxf(largest, weight);
    sum += weight;
    if (lane != j % kLanes) continue;
    chosen[j] = expert;
    weights[j] = weight;
  }
  if (options.score == Score::softmax_topk) {
    const float shift = largest == -INFINITY ? 0.0f : largest;
    sum = 0;
    for (int j = lane; j < k; j += kLanes) {
      weights[j] = ::expf(weights[j] - shift);
      sum += weights[j];
    }
    sum = cuda::sum_of_warp(sum);
  }
  const float factor = factor_of_weights(options, sum);
  for (int j = lane; j < k; j += kLanes) weights[j] *= factor;
}

// Tokens [first, end) by a block; then `take` is called with the sums of each expert, and behind
// those of all experts with the sum for z.
template <int kPer, int kWarps, class Take>
__device__ void route_tokens(const Route& call, int64_t first, int64_t end, const Take& take) {
  const RouteOptions& options = call.options;
  Floats<kPer> sums = 0.0f;
  float z_sum = 0;
  for (int64_t token = first + warp_of_thread(); token < end; token += kWarps) {
    const ExpertScores<kPer> scores(options, call.logits.row<Any>(token));
    choose(call, token, scores);
    const bool is_sigmoid = options.score == Score::sigmoid;
    const Floats<kPer> terms = is_sigmoid ? scores.sigmoids : scores.probabilities;
    sums = sums + terms * Floats<kPer>(1.0f / scores.sum_of_sigmoids);
    z_sum += scores.log_of_sum * scores.log_of_sum;
  }
  __shared__ float of_warps[kWarps][kPer * kLanes], z_of_warps[kWarps];
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    of_warps[warp_of_thread()][lane_of_thread() + i * kLanes] = sums.lanes[i];
  }
  if (lane_of_thread() == 0) z_of_warps[warp_of_thread()] = z_sum;
  __syncthreads();
  for (int i = int(threadIdx.x); i <= options.experts; i += kWarps * kLanes) {
    float sum = 0;
    for (int warp = 0; warp < kWarps; ++warp) {
      sum += i < options.experts ? of_warps[warp][i] : z_of_warps[warp];
    }
    take(i, sum);
  }
}

// A block for each tile.
template <int kPer>
__global__ void __launch_bounds__(kWarps* kLanes)
    route_kernel(const __grid_constant__ Route call, int64_t of_tile) {
  const int64_t first = blockIdx.x * of_tile;
  float* const sums = call.partials + blockIdx.x * (call.options.experts + 1);
  route_tokens<kPer, kWarps>(call, first, ::min(first + of_tile, call.options.tokens),
                             [&](int i, float sum) { sums[i] = sum; });
}

// All tokens and their rows by one block.
template <int kPer>
constexpr int kWarpsOfFew = kPer <= 4 ? 16 : 8;
template <int kPer>
__global__ void __launch_bounds__(kWarpsOfFew<kPer>* kLanes)
    route_few_kernel(const __grid_constant__ Route call, const __grid_constant__ Assign assign) {
  __shared__ cuda::AssignShared shared;
  cuda::let_next_begin();
  cuda::wait_for_previous();
  route_tokens<kPer, kWarpsOfFew<kPer>>(call, 0, call.options.tokens, [&](int i, float sum) {
    *(i < call.options.experts ? call.probability_sums + i : call.z_sum) = sum;
  });
  __syncthreads();  // all choices are written
  cuda::assign_in_block(assign, shared);
}

constexpr int kColumns = 32, kColumnThreads = 32;

// A block for 32 columns, whose tiles its threads divide.
__global__ void __launch_bounds__(kColumns* kColumnThreads)
    add_tiles_kernel(const __grid_constant__ Route call, int64_t tiles) {
  __shared__ double of_threads[kColumnThreads][kColumns];
  const int lane = lane_of_thread(), thread = warp_of_thread();
  const int64_t column = int64_t(blockIdx.x) * kColumns + lane, n = call.options.experts;
  double sum = 0;
  if (column <= n) {
#pragma unroll 4  // loads in flight
    for (int64_t tile = thread; tile < tiles; tile += kColumnThreads) {
      sum += double(call.partials[tile * (n + 1) + column]);
    }
  }
  of_threads[thread][lane] = sum;
  __syncthreads();
  if (thread > 0 || column > n) return;
  sum = 0;
  for (int i = 0; i < kColumnThreads; ++i) sum += of_threads[i][lane];
  *(column < n ? call.probability_sums + column : call.z_sum) = float(sum);
}

// Adds to what an expert has.
template <int kPer>
__device__ void add_to(Floats<kPer>& values, int64_t expert, float term) {
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    if (lane_of_thread() + i * kLanes == expert) values.lanes[i] += term;
  }
}

// Adds what comes back through the weights to the gradients of `target`, which are those of scores,
// or of logits with Score::softmax_topk.
template <int kPer>
__device__ void add_grad_of_weights(const RouteBackward& call, int64_t token,
                                    const ExpertScores<kPer>& scores, Floats<kPer>& target) {
  const RouteOptions& options = call.options;
  const int k = int(options.k);
  const int64_t* chosen = call.chosen + token * k;
  const float* grad = call.grad_weights + token * k;
  const Floats<kPer>& values = scores.of(options.score);
  const bool are_powers = options.score == Score::softmax_topk;
  float shift = 0;
  if (are_powers) {
    float largest = -INFINITY;
    for (int j = 0; j < k; ++j) largest = ::fmaxf(largest, value_of(values, chosen[j]));
    shift = largest == -INFINITY ? 0.0f : largest;
  }
  const auto weight_of = [&](int j) {
    const float value = value_of(values, chosen[j]);
    return are_powers ? ::expf(value - shift) : value;
  };
  float sum = 0, dot = 0;
  for (int j = 0; j < k; ++j) {
    const float weight = weight_of(j);
    sum += weight;
    dot += weight * grad[j];
  }
  if (are_powers) dot /= sum;
  const WeightGradients gradients(options, sum, dot);
  for (int j = 0; j < k; ++j) {
    const float weight = weight_of(j);
    add_to(target, chosen[j], gradients.of(grad[j]) * (are_powers ? weight / sum : 1.0f));
  }
}

template <int kPer>
__global__ void __launch_bounds__(kWarps* kLanes)
    route_backward_kernel(const __grid_constant__ RouteBackward call) {
  using Vector = Floats<kPer>;
  const RouteOptions& options = call.options;
  const int64_t token = int64_t(blockIdx.x) * kWarps + warp_of_thread(), n = options.experts;
  if (token >= options.tokens) return;
  const ExpertScores<kPer> scores(options, call.logits.row<Any>(token));
  const bool is_sigmoid = options.score == Score::sigmoid;
  Vector grads = 0.0f, result = 0.0f;  // of scores; of logits
  if (call.grad_probability_sums != nullptr) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const int expert = lane_of_thread() + i * kLanes;
      grads.lanes[i] = expert < n ? call.grad_probability_sums[expert] : 0.0f;
    }
    if (is_sigmoid) {  // probabilities are sigmoids by their sum
      const float sum = scores.sum_of_sigmoids;
      const float dot = sum_over_experts(scores.sigmoids * grads) / sum;
      grads = (grads - Vector(dot)) * Vector(1.0f / sum);
    }
  }
  if (call.grad_weights != nullptr) {
    const bool to_logits = options.score == Score::softmax_topk;
    add_grad_of_weights(call, token, scores, to_logits ? result : grads);
  }
  if (is_sigmoid) {
    result = result + grad_through_sigmoid(scores.logits, scores.sigmoids, grads);
  } else {
    const Vector dot(sum_over_experts(scores.probabilities * grads));
    result = result + grad_through_softmax(scores.probabilities, grads, dot);
  }
  if (call.grad_z_sum != nullptr) {
    const Vector of_log(2.0f * *call.grad_z_sum * scores.log_of_sum);
    result = result + of_log * scores.probabilities;
  }
  const Pointer<Any> target = call.grad_logits.row<Any>(token);
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int expert = lane_of_thread() + i * kLanes;
    if (expert >= n) continue;
    cuda::store<cuda::Access::single>(target + expert, Floats<1>(result.lanes[i]), 1);
  }
}

// Calls body with how many experts a lane has at the most, as a constant.
template <class Body>
void with_experts_of_lane(int64_t experts, const Body& body) {
  if (experts <= 32) return body(std::integral_constant<int, 1>{});
  if (experts <= 64) return body(std::integral_constant<int, 2>{});
  if (experts <= 128) return body(std::integral_constant<int, 4>{});
  if (experts <= 256) return body(std::integral_constant<int, 8>{});
  if (experts <= 512) return body(std::integral_constant<int, 16>{});
  body(std::integral_constant<int, 32>{});
}

}  // namespace

void route_cuda(const Route& call, const Assign& assign, void* stream) {
  constexpr const char* op = "moe_route";
  if (call.options.tokens <= kFewTokens && are_few(assign)) {
    return with_experts_of_lane(call.options.experts, [&](auto per_lane) {
      const auto kernel = &route_few_kernel<per_lane()>;
      const cuda::Launch how{1, kWarpsOfFew<per_lane()> * kLanes, 0, 1,
                             cuda::can_chain(kernel, op)};
      cuda::launch_kernel(kernel, how, cudaStream_t(stream), op, call, assign);
    });
  }
  cuda::check(cudaPeekAtLastError(), op);  // of somebody before
  const int64_t of_tile = tokens_of_tile(call.options.tokens);
  const int64_t tiles = ceil_div(call.options.tokens, of_tile);
  if (tiles > 0) {
    with_experts_of_lane(call.options.experts, [&](auto per_lane) {
      route_kernel<per_lane()>
          <<<unsigned(tiles), kWarps * kLanes, 0, cudaStream_t(stream)>>>(call, of_tile);
    });
    cuda::check(cudaGetLastError(), op);
  }
  const unsigned blocks = unsigned(ceil_div(call.options.experts + 1, kColumns));
  add_tiles_kernel<<<blocks, kColumns * kColumnThreads, 0, cudaStream_t(stream)>>>(call, tiles);
  cuda::check(cudaGetLastError(), op);
  assign_cuda(assign, stream);
}

void route_backward_cuda(const RouteBackward& call, void* stream) {
  constexpr const char* op = "moe_route_backward";
  const unsigned blocks = unsigned(ceil_div(call.options.tokens, kWarps));
  if (blocks == 0) return;
  cuda::check(cudaPeekAtLastError(), op);
  with_experts_of_lane(call.options.experts, [&](auto per_lane) {
    route_backward_kernel<per_lane()><<<blocks, kWarps * kLanes, 0, cudaStream_t(stream)>>>(call);
  });
  cuda::check(cudaGetLastError(), op);
}

}  // namespace dsx
