// rope_append_ on CUDA: a warp takes some heads of a token, from where they are to where they go;
// where there are many tokens, of vectors, it is rope_append_many_cuda.cuh that does it.
#include "attention/cache/rope_append.h"

#include <stdexcept>

#include "common/cuda/chain.cuh"
#include "attention/cache/rope_append_head_cuda.cuh"
#include "attention/cache/rope_append_many_cuda.cuh"
#include "attention/cache/rope_append_token_cuda.cuh"

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

// A block has some heads of a token, each of its warps every so many; token by token there are so
// many blocks.
template <class Kind, int kEach>
__global__ void __launch_bounds__(kWarp* kWarps)
    append_kernel(const __grid_constant__ RopeAppend call, unsigned blocks_of_token) {
  __shared__ float floats[kWarps][kEach * kWarp];
  cuda::let_next_begin();
  const unsigned row = blockIdx.x / blocks_of_token;
  const unsigned block = blockIdx.x - row * blocks_of_token;
  AppendedToken token(call, row);
  const int64_t step = int64_t(blocks_of_token) * kWarps;
  const int64_t heads = call.q.heads + 2 * call.kv.heads;
  const int width = int(call.kv.width);
  cuda::wait_for_previous();
  int64_t number = int64_t(block) * kWarps + threadIdx.x / kWarp;
  if (number >= heads) return;
  float read[kEach];  // on its way while it is found out where to
  const auto begin_to_read = [&] {
    const HeadOfToken mine(call, number);
    const Heads& heads = mine.choose(call.q, call.k, call.v);
    cuda::read_elements(heads.at<Any>(token.batch, token.number, mine.head), width, read);
  };
  begin_to_read();
  const bool tells = number == 0 && threadIdx.x == 0;
  if (!token.find_place(call, tells)) return;
  cuda::HeadRotation<kEach> rotation(call);
  if (call.pairs > 0 && number < call.q.heads + call.kv.heads) {
    rotation.move_to(uint64_t(token.position));
  }
  token.tell_of_page(call, tells);
  while (number < heads) {
    const HeadOfToken mine(call, number);
    float head[kEach];
    memcpy(head, read, sizeof(head));
    number += step;
    if (number < heads) begin_to_read();
    if (!mine.of_q && token.page < 0) return;
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
        cuda::write_elements(call.q_out.at<T>(token.batch, token.number, mine.head).address, width,
                             head);
      });
    } else {
      void* const elements = mine.of_k ? call.kv.keys : call.kv.values;
      float* const scales = mine.of_k ? call.kv.key_scales : call.kv.value_scales;
      write_head<Kind>(call.kv, head, elements, scales, token.page, mine.head,
                       token.position % kPageTokens);
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
  const bool by_vectors = !are_few && cuda::can_append_by_vectors<DSX_KV>(call);
  const int64_t heads_of_block = int64_t(kWarps) * (are_few ? 1 : kMostHeads);
  const cuda::ManyShape many(call);
  const int64_t of_token = by_vectors ? many.blocks_of_token : ceil_div(heads, heads_of_block);
  if (rows > INT32_MAX / of_token) {
    throw std::runtime_error(std::string(kOp) + ": q has " + std::to_string(rows) +
                             " tokens, expected at most " + std::to_string(INT32_MAX / of_token) +
                             " with so many heads");
  }
  if (by_vectors) return cuda::append_by_vectors<DSX_KV>(call, many, stream, kOp);
  with_each(call.kv.width, [&](auto each) {
    const auto kernel = append_kernel<DSX_KV, decltype(each)::value>;
    const bool chained = are_few && cuda::can_chain(kernel, kOp);
    cuda::launch_kernel(kernel, {unsigned(rows * of_token), kWarp * kWarps, 0, 1, chained},
                        cudaStream_t(stream), kOp, call, unsigned(of_token));
  });
}

}  // namespace dsx
