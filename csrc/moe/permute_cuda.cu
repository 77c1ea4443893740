// moe_permute and moe_unpermute on CUDA. A token is read once for all of its copies, and backward
// reads the gradient of a token once for all of its rows; what is written goes past the cache.
#include "moe/permute.h"

#include <algorithm>
#include <type_traits>

#include "common/cuda/chain.cuh"
#include "common/cuda/check.h"
#include "common/cuda/rows.cuh"
#include "common/cuda/words.cuh"

namespace dsx {

namespace {

using cuda::Floats;

constexpr int kMostThreads = 256;
constexpr int kTogether = 8;        // accesses of a thread that are under way together
constexpr unsigned kClearers = 64;  // blocks that clear the rows that are nobody's

// Calls body with how many choices of a token are worked on together, as a constant.
template <class Body>
void with_batch(int64_t k, const Body& body) {
  if (k <= 2) return body(std::integral_constant<int, 2>());
  if (k <= 4) return body(std::integral_constant<int, 4>());
  body(std::integral_constant<int, 8>());
}

// The places of some choices of a token from number `first` on; of those beyond the last one: none.
template <int kBatch>
struct Places {
  int64_t at[kBatch];

  __device__ Places(const Slots& slots, int64_t token, int64_t first) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      at[b] = first + b < slots.k ? __ldg(slots.places + token * slots.k + first + b) : -1;
    }
  }
};

// Zeros in the rows that are nobody's: block number `block` of kClearers.
template <class Word>
__device__ void clear_rows(const Slots& slots, Word* rows, int64_t words, unsigned block) {
  const int64_t first = ::max(0, *slots.end);
  for (int64_t row = first + block; row < slots.rows; row += kClearers) {
    for (int64_t i = threadIdx.x; i < words; i += blockDim.x) rows[row * words + i] = Word{};
  }
}

constexpr int kWords = 4;  // of a thread

// How rows of so many words, or vectors, are cut into parts, each of a block.
struct Parts {
  int64_t words;    // of a row
  unsigned of_row;  // of 32 bits, as divisions of 64 take long
  int threads;

  Parts(int64_t length, int per_thread) : words(length) {
    of_row = unsigned(ceil_div(words, kMostThreads * per_thread));
    threads = int(ceil_div(ceil_div(words, of_row * per_thread), cuda::kWarp)) * cuda::kWarp;
  }
};

template <class Word>
__global__ void __launch_bounds__(kMostThreads)
    permute_kernel(const __grid_constant__ Permute call, const __grid_constant__ Parts parts) {
  Word* const out = static_cast<Word*>(call.out.data);
  const unsigned copiers = gridDim.x - kClearers;
  if (blockIdx.x >= copiers) {
    return clear_rows(call.slots, out, parts.words, blockIdx.x - copiers);
  }
  const int64_t token = blockIdx.x / parts.of_row;
  const int64_t first = int64_t(blockIdx.x % parts.of_row) * blockDim.x * kWords + threadIdx.x;
  const Word* const source = reinterpret_cast<const Word*>(
      static_cast<const char*>(call.x.data) + call.x.place_of(token) * bytes_of(call.x.dtype));
  Word words[kWords];
#pragma unroll
  for (int v = 0; v < kWords; ++v) {
    const int64_t i = first + v * blockDim.x;
    words[v] = i < parts.words ? source[i] : Word{};
  }
  for (int64_t choice = 0; choice < call.slots.k; choice += kTogether) {
    const Places<kTogether> places(call.slots, token, choice);
#pragma unroll
    for (int b = 0; b < kTogether; ++b) {
      if (!call.slots.is_row(places.at[b])) continue;
      Word* const target = out + places.at[b] * parts.words;
#pragma unroll
      for (int v = 0; v < kWords; ++v) {
        const int64_t i = first + v * blockDim.x;
        if (i < parts.words) cuda::store_streamed(target + i, words[v]);
      }
    }
  }
}

// Elements of a vector; as many of any type, so that dots are added up in one order.
constexpr int kCount = 8;
template <class T>
using Vector = cuda::RowVector<T, kCount>;

// Only of Any may rows be in groups.
template <class T>
__device__ Pointer<T> row_of(const Rows& rows, int64_t row) {
  if constexpr (std::is_same_v<T, Any>) return rows.row<T>(row);
  return rows.even_row<T>(row);
}

// How many of the elements from number i on there are in a vector; 0 beyond the row.
__device__ int count_at(int64_t i, int64_t length) {
  return int(::max(int64_t(0), ::min(int64_t(kCount), length - i)));
}

// Some choices of the tokens of a block, in its shared memory, so that rows need not wait for
// memory twice.
template <int kMost, int kBatch>
struct NearChoices {
  int64_t places[kMost][kBatch];  // below 0: none
  float weights[kMost][kBatch];   // 1 where there are none

  // Those from number `choice` on; all threads of the block call it.
  __device__ void read(const Slots& slots, const Rows& of_slots, int64_t token, int tokens,
                       int64_t choice) {
    __syncthreads();
    for (int n = int(threadIdx.x); n < tokens * kBatch; n += int(blockDim.x)) {
      const int t = n / kBatch, b = n % kBatch;
      int64_t place = -1;
      if (token + t < slots.tokens && choice + b < slots.k) {
        const int64_t at = (token + t) * slots.k + choice + b;
        place = slots.places[at];
        if (!slots.is_row(place)) place = -1;
        weights[t][b] = 1.0f;
        if (of_slots.is_present()) {
          weights[t][b] =
              cuda::load<cuda::Access::single, 1>(of_slots.even_row<Any>(at), 1).lanes[0];
        }
      }
      places[t][b] = place;
    }
    __syncthreads();
  }
};

constexpr int kTokens = 4;  // of a block, if it has all their choices at once
template <int kBatch>
constexpr int kVectorsOf = kBatch > 2 ? 1 : 2;  // of a thread, of each choice

// 64 registers are enough where vectors are of 16 bits, and make four blocks.
template <class T>
constexpr int kBlocks = std::is_same_v<T, BFloat16> || std::is_same_v<T, Half> ? 4 : 1;

template <class T, int kBatch>
__global__ void __launch_bounds__(kMostThreads, kBlocks<T>)
    unpermute_kernel(const __grid_constant__ Unpermute call, const __grid_constant__ Parts parts,
                     int tokens, bool aligned) {
  constexpr int kVectors = kVectorsOf<kBatch>;
  __shared__ NearChoices<kTokens, kBatch> near;
  const Slots& slots = call.slots;
  const int64_t first_token = int64_t(blockIdx.x / parts.of_row) * tokens;
  const int64_t first =
      (int64_t(blockIdx.x % parts.of_row) * blockDim.x * kVectors + threadIdx.x) * kCount;
  const int64_t stride = int64_t(blockDim.x) * kCount;
  cuda::let_next_begin();
  cuda::wait_for_previous();
  for (int t = 0; t < tokens && first_token + t < slots.tokens; ++t) {
    Floats<kCount> sums[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) sums[v] = -0.0f;  // to which a first term is added as it is
    bool is_empty = true;
    for (int64_t choice = 0; choice < slots.k; choice += kBatch) {
      if (t == 0) near.read(slots, call.weights, first_token, tokens, choice);
      Vector<T> vectors[kVectors][kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int64_t place = near.places[t][b];
        if (place < 0) continue;
        const Pointer<T> row = row_of<T>(call.y, place);
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          const int count = count_at(first + v * stride, call.length);
          if (count == 0) continue;
          vectors[v][b] = cuda::fetch<kCount>(row, first + v * stride, count, aligned);
        }
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (near.places[t][b] < 0) continue;
        const Floats<kCount> weight = near.weights[t][b];
#pragma unroll
        for (int v = 0; v < kVectors; ++v) sums[v] = sums[v] + floats_of(vectors[v][b]) * weight;
        is_empty = false;
      }
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int count = count_at(first + v * stride, call.length);
      if (count == 0) continue;
      if (is_empty) sums[v] = 0.0f;
      cuda::put<cuda::Stored::streamed>(call.out.even_row<T>(first_token + t), first + v * stride,
                                        count, aligned, sums[v]);
    }
  }
}

struct Block {  // that adds up over all of its threads
  static constexpr bool kShort = false;
};

template <class T, int kBatch>
__global__ void __launch_bounds__(kMostThreads)
    unpermute_backward_kernel(const __grid_constant__ UnpermuteBackward call, bool aligned) {
  constexpr int kVectors = kTogether / kBatch;
  __shared__ NearChoices<1, kBatch> near;
  const int64_t (&places)[kBatch] = near.places[0];
  const Slots& slots = call.slots;
  if (blockIdx.x >= slots.tokens) {
    const unsigned block = unsigned(blockIdx.x - slots.tokens);
    if (call.grad_y.dtype == Dtype::float32) {
      return clear_rows(slots, static_cast<float*>(call.grad_y.data), call.length, block);
    }
    return clear_rows(slots, static_cast<uint16_t*>(call.grad_y.data), call.length, block);
  }
  const int64_t token = blockIdx.x;
  const Pointer<T> grad_out = row_of<T>(call.grad_out, token);
  const int64_t stride = int64_t(blockDim.x) * kCount;
  int number = 0;
  for (int64_t choice = 0; choice < slots.k; choice += kBatch) {
    near.read(slots, call.weights, token, 1, choice);
    float dots[kBatch] = {};
    for (int64_t i = int64_t(threadIdx.x) * kCount; i < call.length; i += kVectors * stride) {
      Vector<T> grads[kVectors], vectors[kVectors][kBatch];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = i + v * stride;
        const int count = count_at(at, call.length);
        if (count == 0) continue;
        grads[v] = cuda::fetch<kCount>(grad_out, at, count, aligned);
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          if (places[b] < 0) continue;
          vectors[v][b] = cuda::fetch<kCount>(row_of<T>(call.y, places[b]), at, count, aligned);
        }
      }
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = i + v * stride;
        const int count = count_at(at, call.length);
        if (count == 0) continue;
        const Floats<kCount> grad = floats_of(grads[v]);
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          if (places[b] < 0) continue;
          const Floats<kCount> terms = grad * floats_of(vectors[v][b]);
#pragma unroll
          for (int lane = 0; lane < kCount; ++lane) dots[b] += terms.lanes[lane];
          cuda::put<cuda::Stored::streamed>(call.grad_y.even_row<T>(places[b]), at, count, aligned,
                                            grad * Floats<kCount>(near.weights[0][b]));
        }
      }
    }
    cuda::add_over_team<Block>(dots, number++);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (int(threadIdx.x) != b || choice + b >= slots.k) continue;
      const int64_t at = token * slots.k + choice + b;
      cuda::store<cuda::Access::single>(call.grad_weights.even_row<Any>(at), Floats<1>(dots[b]), 1);
    }
  }
}

// Calls body with the storage type of all these rows if each of them is made of whole vectors that
// may be accessed as such, else with Any; and whether vectors of Any may.
template <class Body>
void with_vectors(std::initializer_list<Rows> all, int64_t length, const Body& body) {
  const Dtype dtype = all.begin()->dtype;
  const bool aligned = cuda::all_aligned(all);
  const bool same = std::all_of(all.begin(), all.end(), [&](const Rows& rows) {
    return rows.dtype == dtype && rows.group == 0;
  });
  if (!same || !aligned || length % kCount != 0) return body(Any{}, aligned);
  with_storage_type(dtype, [&](auto storage) { body(storage, true); });
}

template <class Word>
void launch_permute(const Permute& call, void* stream) {
  const Parts parts(call.length * bytes_of(call.x.dtype) / int64_t(sizeof(Word)), kWords);
  const unsigned blocks = unsigned(call.slots.tokens * parts.of_row) + kClearers;
  permute_kernel<Word><<<blocks, parts.threads, 0, cudaStream_t(stream)>>>(call, parts);
}

}  // namespace

void permute_cuda(const Permute& call, void* stream) {
  constexpr const char* op = "moe_permute";
  if (call.length == 0 || call.slots.rows == 0) return;
  cuda::check(cudaPeekAtLastError(), op);  // of somebody before
  const uint64_t bytes = uint64_t(bytes_of(call.x.dtype));
  const uint64_t bits = uint64_t(reinterpret_cast<uintptr_t>(call.x.data)) |
                        uint64_t(reinterpret_cast<uintptr_t>(call.out.data)) |
                        uint64_t(call.x.pitch | call.x.group_pitch | call.length) * bytes;
  cuda::with_word<uint16_t>(bits, [&](auto word) { launch_permute<decltype(word)>(call, stream); });
  cuda::check(cudaGetLastError(), op);
}

void unpermute_cuda(const Unpermute& call, void* stream) {
  constexpr const char* op = "moe_unpermute";
  if (call.length == 0 || call.slots.tokens == 0) return;
  with_vectors({call.y, call.out}, call.length, [&](auto storage, bool aligned) {
    with_batch(call.slots.k, [&](auto batch) {
      using T = decltype(storage);
      const Parts parts(ceil_div(call.length, kCount), kVectorsOf<batch()>);
      const bool few = call.slots.tokens <= cuda::kChainedRows;
      const int tokens = call.slots.k <= batch() && !few ? kTokens : 1;
      const unsigned blocks = unsigned(ceil_div(call.slots.tokens, tokens) * parts.of_row);
      const auto kernel = &unpermute_kernel<T, batch()>;
      const bool chained = few && cuda::can_chain(kernel, op);
      cuda::launch_kernel(kernel, {blocks, parts.threads, 0, 1, chained}, cudaStream_t(stream), op,
                          call, parts, tokens, aligned);
    });
  });
}

void unpermute_backward_cuda(const UnpermuteBackward& call, void* stream) {
  constexpr const char* op = "moe_unpermute_backward";
  cuda::check(cudaPeekAtLastError(), op);
  const auto rows = {call.y, call.grad_out, call.grad_y};
  with_vectors(rows, call.length, [&](auto storage, bool aligned) {
    with_batch(call.slots.k, [&](auto batch) {
      using T = decltype(storage);
      const Parts parts(std::max<int64_t>(1, ceil_div(call.length, kCount)), kTogether / batch());
      const unsigned blocks = unsigned(call.slots.tokens) + kClearers;
      unpermute_backward_kernel<T, batch()>
          <<<blocks, parts.threads, 0, cudaStream_t(stream)>>>(call, aligned);
    });
  });
  cuda::check(cudaGetLastError(), op);
}

}  // namespace dsx
