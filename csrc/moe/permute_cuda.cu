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
      at[b] = first + b < slots.k ? slots.places[token * slots.k + first + b] : -1;
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

// The weights of the choices of a token from number `first` on; 1 if there are none. All are asked
// for before any is there.
template <int kBatch>
struct Weights {
  float of[kBatch];

  __device__ Weights(const Rows& weights, const Slots& slots, int64_t token, int64_t first) {
    const int64_t at = token * slots.k + first;
    if (!weights.is_present()) {
      read(slots, first, [](int) { return 1.0f; });
    } else if (weights.dtype == Dtype::float32) {
      const float* const floats = static_cast<const float*>(weights.data) + at;
      read(slots, first, [&](int b) { return floats[b]; });
    } else {
      const Pointer<Any> numbers = weights.even_row<Any>(at);
      read(slots, first,
           [&](int b) { return cuda::load<cuda::Access::single, 1>(numbers + b, 1).lanes[0]; });
    }
  }

 private:
  template <class Number>
  __device__ void read(const Slots& slots, int64_t first, const Number& number_at) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) of[b] = first + b < slots.k ? number_at(b) : 1.0f;
  }
};

// A vector of each row, from element i on.
template <class T, int kBatch>
__device__ void fetch_rows(const Slots& slots, const Rows& y, const Places<kBatch>& places,
                           int64_t i, int count, bool aligned, Vector<T> (&vectors)[kBatch]) {
#pragma unroll
  for (int b = 0; b < kBatch; ++b) {
    if (!slots.is_row(places.at[b])) continue;
    vectors[b] = cuda::fetch<kCount>(y.row<T>(places.at[b]), i, count, aligned);
  }
}

// How many of the elements from number i on there are in a vector; 0 beyond the row.
__device__ int count_at(int64_t i, int64_t length) {
  return int(::max(int64_t(0), ::min(int64_t(kCount), length - i)));
}

// A thread has a vector: of so short a kernel many threads hide best what each one waits for.
template <class T, int kBatch>
__global__ void __launch_bounds__(kMostThreads)
    unpermute_kernel(const __grid_constant__ Unpermute call, const __grid_constant__ Parts parts,
                     bool aligned) {
  const int64_t token = blockIdx.x / parts.of_row;
  const int64_t i = (int64_t(blockIdx.x % parts.of_row) * blockDim.x + threadIdx.x) * kCount;
  const int count = count_at(i, call.length);
  cuda::let_next_begin();
  cuda::wait_for_previous();
  if (count == 0) return;
  Floats<kCount> sums = 0.0f;
  bool is_first = true;
  for (int64_t choice = 0; choice < call.slots.k; choice += kBatch) {
    const Places<kBatch> places(call.slots, token, choice);
    Vector<T> vectors[kBatch];
    fetch_rows<T>(call.slots, call.y, places, i, count, aligned, vectors);
    const Weights<kBatch> weights(call.weights, call.slots, token, choice);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (!call.slots.is_row(places.at[b])) continue;
      const Floats<kCount> term = floats_of(vectors[b]) * Floats<kCount>(weights.of[b]);
      sums = is_first ? term : sums + term;
      is_first = false;
    }
  }
  cuda::put<cuda::Stored::streamed>(call.out.even_row<T>(token), i, count, aligned, sums);
}

struct Block {  // that adds up over all of its threads
  static constexpr bool kShort = false;
};

template <class T, int kBatch>
__global__ void __launch_bounds__(kMostThreads)
    unpermute_backward_kernel(const __grid_constant__ UnpermuteBackward call, bool aligned) {
  constexpr int kVectors = kTogether / kBatch;
  const Slots& slots = call.slots;
  if (blockIdx.x >= slots.tokens) {
    const unsigned block = unsigned(blockIdx.x - slots.tokens);
    if (call.grad_y.dtype == Dtype::float32) {
      return clear_rows(slots, static_cast<float*>(call.grad_y.data), call.length, block);
    }
    return clear_rows(slots, static_cast<uint16_t*>(call.grad_y.data), call.length, block);
  }
  const int64_t token = blockIdx.x;
  const Pointer<T> grad_out = call.grad_out.row<T>(token);
  const int64_t stride = int64_t(blockDim.x) * kCount;
  int number = 0;
  for (int64_t choice = 0; choice < slots.k; choice += kBatch) {
    const Places<kBatch> places(slots, token, choice);
    const Weights<kBatch> weights(call.weights, slots, token, choice);
    float dots[kBatch] = {};
    for (int64_t i = int64_t(threadIdx.x) * kCount; i < call.length; i += kVectors * stride) {
      Vector<T> grads[kVectors], vectors[kVectors][kBatch];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int count = count_at(i + v * stride, call.length);
        if (count == 0) continue;
        grads[v] = cuda::fetch<kCount>(grad_out, i + v * stride, count, aligned);
        fetch_rows<T>(slots, call.y, places, i + v * stride, count, aligned, vectors[v]);
      }
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int count = count_at(i + v * stride, call.length);
        if (count == 0) continue;
        const Floats<kCount> grad = floats_of(grads[v]);
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          if (!slots.is_row(places.at[b])) continue;
          const Floats<kCount> terms = grad * floats_of(vectors[v][b]);
#pragma unroll
          for (int lane = 0; lane < kCount; ++lane) dots[b] += terms.lanes[lane];
          cuda::put<cuda::Stored::streamed>(call.grad_y.even_row<T>(places.at[b]), i + v * stride,
                                            count, aligned, grad * Floats<kCount>(weights.of[b]));
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
  const bool same =
      std::all_of(all.begin(), all.end(), [&](const Rows& rows) { return rows.dtype == dtype; });
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
      const Parts parts(ceil_div(call.length, kCount), 1);
      const unsigned blocks = unsigned(call.slots.tokens * parts.of_row);
      const auto kernel = &unpermute_kernel<T, batch()>;
      const bool chained = call.slots.tokens <= cuda::kChainedRows && cuda::can_chain(kernel, op);
      cuda::launch_kernel(kernel, {blocks, parts.threads, 0, 1, chained}, cudaStream_t(stream), op,
                          call, parts, aligned);
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
