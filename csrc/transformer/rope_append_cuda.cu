// rope_append_ on CUDA: a warp takes a head of a token, from where it is to where it goes.
#include "transformer/rope_append.h"

#include <cuda_fp8.h>

#include <stdexcept>

#include "common/cuda/chain.cuh"
#include "common/cuda/vector_io.cuh"

namespace dsx {

#include "transformer/rope_math.inl"

namespace {

using cuda::Access;
using cuda::Floats;
using Value = Floats<1>;

constexpr const char* kOp = "rope_append_";
constexpr int kWarp = 32, kHeads = 4;  // heads of a block

__device__ inline float sum_of_warp(float value) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(0xffffffff, value, distance);
  }
  return value;
}

__device__ inline float load_one(Pointer<Any> source) {
  return cuda::load<Access::single, 1>(source, 1).lanes[0];
}
__device__ inline void store_one(Pointer<Any> target, float value) {
  cuda::store<Access::single>(target, Value(value), 1);
}

// Calls body(i) for the elements of a head that this lane has.
template <class Body>
__device__ inline void for_each_element(int64_t width, const Body& body) {
  for (int64_t i = threadIdx.x % kWarp; i < width; i += kWarp) body(i);
}

__device__ inline void normalise(const RopeAppend& call, const HeadWeight& weight, float* head) {
  if (weight.data == nullptr) return;
  float squares = 0;
  for_each_element(call.kv.width, [&](int64_t i) { squares += head[i] * head[i]; });
  const float factor = rsqrt(sum_of_warp(squares) / float(call.kv.width) + call.eps);
  const auto weights = Pointer<Any>::to(weight.data, weight.dtype);
  for_each_element(call.kv.width, [&](int64_t i) {
    head[i] = head[i] * factor * (load_one(weights + i) + call.weight_offset);
  });
}

__device__ inline void turn(const RopeAppend& call, uint64_t position, float* head) {
  for_each_element(call.pairs, [&](int64_t j) {
    const double radians = call.frequencies.at(j);
    const bool finite = is_finite(radians);
    const Angle angle = angle_at(position, finite ? in_turns(radians) : 0);
    const Value rest(finite ? angle.rest : float(radians - radians));
    const Rotation<Value> r =
        rotation(rest, Value(angle.quarter_cos), Value(angle.quarter_sin), call.scale);
    float& first = head[call.interleaved ? 2 * j : j];
    float& second = head[call.interleaved ? 2 * j + 1 : call.pairs + j];
    const Value a(first), b(second);
    first = rotated_first(a, b, r).lanes[0];
    second = rotated_second(a, b, r).lanes[0];
  });
}

template <class Kind>
__device__ inline uint8_t code_of(float value) {
  if constexpr (std::is_same_v<Kind, Int8Kv>) return uint8_t(__float2int_rn(value));
  return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
}

template <class Kind>
__device__ inline void write_codes(const float* head, int64_t width, uint8_t* target,
                                   float* scale) {
  float largest = 0;
  for_each_element(width, [&](int64_t i) { largest = dsx::max(largest, ::fabsf(head[i])); });
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    largest = dsx::max(largest, __shfl_xor_sync(0xffffffff, largest, distance));
  }
  const bool finite = isfinite(largest);
  const float exact = largest / Kind::kLargest;
  const bool none = !finite || exact < kLeastScale;
  const float factor = none ? 0.0f : Kind::kLargest / largest;
  for_each_element(width,
                   [&](int64_t i) { target[i] = none ? 0 : code_of<Kind>(head[i] * factor); });
  if (threadIdx.x % kWarp == 0) *scale = !finite ? NAN : none ? 0.0f : exact;
}

template <class Kind>
__device__ inline void write_head(const PagedKv& kv, const float* head, void* elements,
                                  float* scales, int64_t page, int64_t number, int64_t token) {
  const int64_t place = kv.place(page, number, token);
  if constexpr (Kind::kQuantized) {
    write_codes<Kind>(head, kv.width, static_cast<uint8_t*>(elements) + place,
                      scales + kv.scale_place(page, number, token));
  } else {
    const auto target = Pointer<Any>::to(elements, kv.dtype) + place;
    for_each_element(kv.width, [&](int64_t i) { store_one(target + i, head[i]); });
  }
}

// A block has some heads of a token, those of q first, then of k, then of v; token by token there
// are so many blocks.
template <class Kind>
__global__ void __launch_bounds__(kWarp* kHeads)
    append_kernel(const __grid_constant__ RopeAppend call, unsigned blocks_of_token) {
  __shared__ float floats[kHeads][kLargestAppendedWidth];
  cuda::let_next_begin();
  const unsigned row_number = blockIdx.x / blocks_of_token;
  const int64_t row = row_number, batch = row / call.news.tokens;
  const int64_t token = row - batch * call.news.tokens;
  const int64_t number =
      int64_t(blockIdx.x - row_number * blocks_of_token) * kHeads + threadIdx.x / kWarp;
  cuda::wait_for_previous();
  if (number >= call.q.heads + 2 * call.kv.heads) return;
  const Sequence sequence = sequence_of(call.kv, call.news, batch);
  const bool first = number == 0 && threadIdx.x == 0;
  if (sequence.wrong && first) *call.violations = 1;
  if (token >= sequence.count) return;
  const int64_t position = sequence.position(token);
  const int64_t page = call.kv.page_of(sequence.slot, position / kPageTokens);
  if (page < 0 && first) *call.violations = 1;
  const bool of_q = number < call.q.heads;
  const int64_t kv_head = of_q ? 0 : (number - call.q.heads) % call.kv.heads;
  const bool of_k = !of_q && number < call.q.heads + call.kv.heads;
  if (!of_q && page < 0) return;
  const auto source = of_q   ? call.q.at<Any>(batch, token, number)
                      : of_k ? call.k.at<Any>(batch, token, kv_head)
                             : call.v.at<Any>(batch, token, kv_head);
  float* const head = floats[threadIdx.x / kWarp];
  for_each_element(call.kv.width, [&](int64_t i) { head[i] = load_one(source + i); });
  if (of_q || of_k) {
    normalise(call, of_q ? call.q_weight : call.k_weight, head);
    __syncwarp();
    turn(call, uint64_t(position), head);
    __syncwarp();
  }
  if (of_q) {
    for_each_element(call.kv.width, [&](int64_t i) { store_one(source + i, head[i]); });
  } else if (of_k) {
    write_head<Kind>(call.kv, head, call.kv.keys, call.kv.key_scales, page, kv_head,
                     position % kPageTokens);
  } else {
    write_head<Kind>(call.kv, head, call.kv.values, call.kv.value_scales, page, kv_head,
                     position % kPageTokens);
  }
}

}  // namespace

void rope_append_cuda(const RopeAppend& call, void* stream) {
  const int64_t heads = call.q.heads + 2 * call.kv.heads;
  const int64_t rows = call.news.batches * call.news.tokens;
  if (heads == 0 || rows == 0) return;
  const int64_t of_token = ceil_div(heads, int64_t(kHeads));
  if (rows > INT32_MAX / of_token) {
    throw std::runtime_error(std::string(kOp) + ": q has " + std::to_string(rows) +
                             " tokens, expected at most " + std::to_string(INT32_MAX / of_token) +
                             " with so many heads");
  }
  const auto kernel = append_kernel<DSX_KV>;
  const bool chained = rows <= cuda::kChainedRows && cuda::can_chain(kernel, kOp);
  cuda::launch_kernel(kernel, {unsigned(rows * of_token), kWarp * kHeads, 0, 1, chained},
                      cudaStream_t(stream), kOp, call, unsigned(of_token));
}

}  // namespace dsx
