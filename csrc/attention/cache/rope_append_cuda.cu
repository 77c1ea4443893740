// rope_append_ on CUDA: a warp takes some heads of a token, from where they are to where they go.
#include "attention/cache/rope_append.h"

#include <stdexcept>

#include "common/cuda/chain.cuh"
#include "attention/cache/rope_append_head_cuda.cuh"

namespace dsx {
namespace {

constexpr const char* kOp = "rope_append_";
constexpr int kWarp = 32, kWarps = 4;  // of a block
constexpr int kMostHeads = 4;          // of a warp, where there are many tokens

template <class Kind, int kEach>
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

// Which of the heads of a token one is: those of q come first, then those of k, then those of v.
struct HeadOfToken {
  bool of_q, of_k;
  int64_t head;

  __device__ HeadOfToken(const RopeAppend& call, int64_t number)
      : of_q(number < call.q.heads),
        of_k(!of_q && number < call.q.heads + call.kv.heads),
        head(number - (of_q   ? 0
                       : of_k ? call.q.heads
                              : call.q.heads + call.kv.heads)) {}

  __device__ Pointer<Any> source(const RopeAppend& call, int64_t batch, int64_t token) const {
    const Heads& heads = of_q ? call.q : of_k ? call.k : call.v;
    return heads.at<Any>(batch, token, head);
  }
};

// A block has some heads of a token, each of its warps every so many; token by token there are so
// many blocks.
template <class Kind, int kEach>
__global__ void __launch_bounds__(kWarp* kWarps)
    append_kernel(const __grid_constant__ RopeAppend call, unsigned blocks_of_token) {
  __shared__ float floats[kWarps][kEach * kWarp];
  cuda::let_next_begin();
  const unsigned row_number = blockIdx.x / blocks_of_token;
  const int64_t row = row_number, batch = row / call.news.tokens;
  const int64_t token = row - batch * call.news.tokens;
  const unsigned block = blockIdx.x - row_number * blocks_of_token;
  const int64_t step = int64_t(blocks_of_token) * kWarps;
  const int64_t heads = call.q.heads + 2 * call.kv.heads;
  const int width = int(call.kv.width);
  cuda::wait_for_previous();
  int64_t number = int64_t(block) * kWarps + threadIdx.x / kWarp;
  if (number >= heads) return;
  float read[kEach];  // on its way while it is found out where to
  const auto begin_to_read = [&] {
    cuda::read_elements(HeadOfToken(call, number).source(call, batch, token), width, read);
  };
  begin_to_read();
  const Sequence sequence = sequence_of(call.kv, call.news, batch);
  const bool first = number == 0 && threadIdx.x == 0;
  if (sequence.wrong && first) *call.violations = 1;
  if (token >= sequence.count) return;
  const int64_t position = sequence.position(token);
  const int64_t page = call.kv.page_of(sequence.slot, position / kPageTokens);
  if (page < 0 && first) *call.violations = 1;
  cuda::HeadRotation<kEach> rotation(call);
  if (call.pairs > 0 && number < call.q.heads + call.kv.heads) rotation.move_to(uint64_t(position));
  while (number < heads) {
    const HeadOfToken mine(call, number);
    float head[kEach];
    memcpy(head, read, sizeof(head));
    number += step;
    if (number < heads) begin_to_read();
    if (!mine.of_q && page < 0) return;
    if (mine.of_q || mine.of_k) {
      const HeadWeight& weight = mine.of_q ? call.q_weight : call.k_weight;
      if (weight.is_present()) {
        float weights[kEach];
        cuda::read_elements(Pointer<Any>::to(weight.data, weight.dtype), width, weights);
        cuda::normalise(call, weights, head);
      }
      if (call.pairs > 0) cuda::rotate(rotation, floats[threadIdx.x / kWarp], head);
    }
    if (mine.of_q) {
      cuda::with_stored_type(call.q_out.dtype, [&](auto storage) {
        using T = decltype(storage);
        cuda::write_elements(call.q_out.at<T>(batch, token, mine.head).address, width, head);
      });
    } else {
      void* const elements = mine.of_k ? call.kv.keys : call.kv.values;
      float* const scales = mine.of_k ? call.kv.key_scales : call.kv.value_scales;
      write_head<Kind>(call.kv, head, elements, scales, page, mine.head, position % kPageTokens);
    }
  }
}

// Calls body with how many elements of a head each lane has.
template <class Body>
void with_each(int64_t width, const Body& body) {
  if (width <= 64) return body(std::integral_constant<int, 2>{});
  if (width <= 128) return body(std::integral_constant<int, 4>{});
  return body(std::integral_constant<int, kLargestAppendedWidth / kWarp>{});
}

}  // namespace

void rope_append_cuda(const RopeAppend& call, void* stream) {
  const int64_t heads = call.q.heads + 2 * call.kv.heads;
  const int64_t rows = call.news.batches * call.news.tokens;
  if (heads == 0 || rows == 0) return;
  const bool are_few = rows <= cuda::kChainedRows;
  const int64_t of_token = ceil_div(heads, int64_t(kWarps) * (are_few ? 1 : kMostHeads));
  if (rows > INT32_MAX / of_token) {
    throw std::runtime_error(std::string(kOp) + ": q has " + std::to_string(rows) +
                             " tokens, expected at most " + std::to_string(INT32_MAX / of_token) +
                             " with so many heads");
  }
  with_each(call.kv.width, [&](auto each) {
    const auto kernel = append_kernel<DSX_KV, decltype(each)::value>;
    const bool chained = are_few && cuda::can_chain(kernel, kOp);
    cuda::launch_kernel(kernel, {unsigned(rows * of_token), kWarp * kWarps, 0, 1, chained},
                        cudaStream_t(stream), kOp, call, unsigned(of_token));
  });
}

}  // namespace dsx
