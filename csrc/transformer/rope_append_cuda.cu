// rope_append_ on CUDA: a warp takes a head of a token, from where it is to where it goes.
#include "transformer/rope_append.h"

#include <stdexcept>

#include "common/cuda/chain.cuh"
#include "transformer/rope_append_head_cuda.cuh"

namespace dsx {
namespace {

constexpr const char* kOp = "rope_append_";
constexpr int kWarp = 32, kHeads = 4;  // heads of a block
constexpr int kEach = kLargestAppendedWidth / kWarp;

template <class Kind>
__device__ inline void write_head(const PagedKv& kv, const float (&head)[kEach], void* elements,
                                  float* scales, int64_t page, int64_t number, int64_t token) {
  const int64_t place = kv.place(page, number, token);
  const int width = int(kv.width);
  if constexpr (Kind::kQuantized) {
    const cuda::StoredHead<Kind, uint8_t, kEach> codes(head, width);
    codes.write(static_cast<uint8_t*>(elements) + place, width);
    if (threadIdx.x % kWarp == 0) scales[kv.scale_place(page, number, token)] = codes.scale;
  } else {
    cuda::with_stored_type(kv.dtype, [&](auto storage) {
      cuda::write_elements(static_cast<decltype(storage)*>(elements) + place, width, head);
    });
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
  const int width = int(call.kv.width);
  cuda::wait_for_previous();
  if (number >= call.q.heads + 2 * call.kv.heads) return;
  const bool of_q = number < call.q.heads;
  const int64_t kv_head = of_q ? 0 : (number - call.q.heads) % call.kv.heads;
  const bool of_k = !of_q && number < call.q.heads + call.kv.heads;
  const auto source = of_q   ? call.q.at<Any>(batch, token, number)
                      : of_k ? call.k.at<Any>(batch, token, kv_head)
                             : call.v.at<Any>(batch, token, kv_head);
  float head[kEach];  // on its way while it is found out where to
  cuda::read_elements(source, width, head);
  const Sequence sequence = sequence_of(call.kv, call.news, batch);
  const bool first = number == 0 && threadIdx.x == 0;
  if (sequence.wrong && first) *call.violations = 1;
  if (token >= sequence.count) return;
  const int64_t position = sequence.position(token);
  const int64_t page = call.kv.page_of(sequence.slot, position / kPageTokens);
  if (page < 0 && first) *call.violations = 1;
  if (!of_q && page < 0) return;
  if (of_q || of_k) {
    const HeadWeight& weight = of_q ? call.q_weight : call.k_weight;
    if (weight.data != nullptr) {
      float weights[kEach];
      cuda::read_elements(Pointer<Any>::to(weight.data, weight.dtype), width, weights);
      cuda::normalise(call, weights, head);
    }
    if (call.pairs > 0) {
      cuda::Turning<kEach> turning(call);
      turning.move_to(uint64_t(position));
      cuda::turn(turning, floats[threadIdx.x / kWarp], head);
    }
  }
  if (of_q) {
    cuda::with_stored_type(call.q_out.dtype, [&](auto storage) {
      using T = decltype(storage);
      cuda::write_elements(call.q_out.at<T>(batch, token, number).address, width, head);
    });
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
