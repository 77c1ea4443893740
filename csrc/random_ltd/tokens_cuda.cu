// Rows of tokens on CUDA. A team of threads has one row or several, of which each thread asks for
// several words before it writes the first; what is written goes past the cache.
#include "random_ltd/tokens.h"

#include <algorithm>
#include <climits>
#include <cstring>

#include "common/cuda/check.h"
#include "common/math.h"

namespace dsx {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 6;  // of a multiprocessor

// What a team has under way together: so many rows, of each so many words of a thread.
template <int rows, int words>
struct Shape {
  static constexpr int kRows = rows, kWords = words;
  static constexpr bool kShifts = false;
};
struct Shifted {  // rows that begin anywhere
  static constexpr int kRows = 2, kWords = 1;
  static constexpr bool kShifts = true;
};

// How rows of so many bytes are cut among the threads of a block.
struct Teams {
  int64_t bytes;
  int threads = 1;  // of a team, a power of two

  Teams(int64_t of_row, int words) : bytes(of_row) {
    while (threads < kThreads && int64_t(threads) * words * 16 < bytes) threads *= 2;
  }
  DSX_HOST_DEVICE int count() const { return kThreads / threads; }
};

// Past the first cache, of which other rows have more use.
__device__ inline uint4 load_streamed(const char* row, int word) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(reinterpret_cast<const uint4*>(row) + word));
  return value;
}

// 16 bytes from number `bytes` of 32 on.
__device__ inline uint4 shifted(const uint4& a, const uint4& b, unsigned bytes) {
  const bool by_two = bytes & 8, by_one = bytes & 4;
  uint32_t w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
  for (int i = 0; i < 6; ++i) w[i] = by_two ? w[i + 2] : w[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) w[i] = by_one ? w[i + 1] : w[i];
  const unsigned bits = bytes % 4 * 8;
  return {__funnelshift_r(w[0], w[1], bits), __funnelshift_r(w[1], w[2], bits),
          __funnelshift_r(w[2], w[3], bits), __funnelshift_r(w[3], w[4], bits)};
}

// Where some rows come from, and where they go; null: zeros, and nowhere.
template <class S>
struct RowsOfTeam {
  const char* sources[S::kRows];
  char* targets[S::kRows];

  __device__ void copy(const Teams& teams, int lane) const {
    if constexpr (S::kShifts) {
      copy_edges(teams, lane);
      copy_shifted(teams, lane);
    } else {
      copy_words(teams, lane);
    }
  }

 private:
  __device__ void copy_words(const Teams& teams, int lane) const {
    const int words = int(teams.bytes / 16);
    for (int first = lane; first < words; first += teams.threads * S::kWords) {
      uint4 values[S::kRows][S::kWords];
#pragma unroll
      for (int r = 0; r < S::kRows; ++r) {
#pragma unroll
        for (int w = 0; w < S::kWords; ++w) {
          const int i = first + w * teams.threads;
          values[r][w] = {};
          if (sources[r] != nullptr && i < words) values[r][w] = load_streamed(sources[r], i);
        }
      }
#pragma unroll
      for (int r = 0; r < S::kRows; ++r) {
#pragma unroll
        for (int w = 0; w < S::kWords; ++w) {
          const int i = first + w * teams.threads;
          if (targets[r] != nullptr && i < words) {
            __stcs(reinterpret_cast<uint4*>(targets[r]) + i, values[r][w]);
          }
        }
      }
    }
  }

  // Bytes of the row ahead of the first word of the target that is whole.
  __device__ static int64_t before(const char* target, int64_t bytes) {
    const int64_t head = -reinterpret_cast<uintptr_t>(target) % 16;
    return head < bytes ? head : bytes;
  }

  // What is before the first of those words and behind the last, a byte at a time.
  __device__ void copy_edges(const Teams& teams, int lane) const {
    char values[S::kRows];
    bool is_there[S::kRows];
    for (int e = lane; e < 32; e += teams.threads) {
      const int64_t at = e < 16 ? e : teams.bytes - 32 + e;
#pragma unroll
      for (int r = 0; r < S::kRows; ++r) {
        const int64_t head = before(targets[r], teams.bytes);
        is_there[r] = e < 16 ? e < head : 32 - e <= (teams.bytes - head) % 16;
        is_there[r] &= targets[r] != nullptr;
        values[r] = 0;
        if (is_there[r] && sources[r] != nullptr) values[r] = __ldg(sources[r] + at);
      }
#pragma unroll
      for (int r = 0; r < S::kRows; ++r) {
        if (is_there[r]) targets[r][at] = values[r];
      }
    }
  }

  // Words of the target, each of two words of the source that have a byte of the row.
  __device__ void copy_shifted(const Teams& teams, int lane) const {
    const int most = int(teams.bytes / 16);
    for (int i = lane; i < most; i += teams.threads) {
      uint4 low[S::kRows], high[S::kRows];
#pragma unroll
      for (int r = 0; r < S::kRows; ++r) {
        low[r] = high[r] = {};
        const int64_t head = before(targets[r], teams.bytes);
        if (sources[r] == nullptr || i >= (teams.bytes - head) / 16) continue;
        const char* const source = sources[r] + head;
        const unsigned shift = unsigned(reinterpret_cast<uintptr_t>(source) % 16);
        const uint4* const words = reinterpret_cast<const uint4*>(source - shift) + i;
        low[r] = __ldg(words);
        if (shift != 0) high[r] = __ldg(words + 1);
      }
#pragma unroll
      for (int r = 0; r < S::kRows; ++r) {
        const int64_t head = before(targets[r], teams.bytes);
        if (targets[r] == nullptr || i >= (teams.bytes - head) / 16) continue;
        const unsigned shift = unsigned(reinterpret_cast<uintptr_t>(sources[r] + head) % 16);
        __stcs(reinterpret_cast<uint4*>(targets[r] + head) + i, shifted(low[r], high[r], shift));
      }
    }
  }
};

// A block has some ids of a sample.
template <class S>
__global__ void __launch_bounds__(kThreads, kBlocks)
    move_kernel(const __grid_constant__ MoveTokens call, const __grid_constant__ Teams teams,
                int64_t blocks, unsigned of_sample) {
  const KeptTokens& tokens = call.tokens;
  const int lane = int(threadIdx.x) % teams.threads, team = int(threadIdx.x) / teams.threads;
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const int64_t sample = quotient(block, of_sample);
    const int64_t first = (block - sample * of_sample) * teams.count() * S::kRows + team;
    RowsOfTeam<S> rows;
#pragma unroll
    for (int k = 0; k < S::kRows; ++k) {
      const int64_t i = first + k * teams.count();
      rows.sources[k] = rows.targets[k] = nullptr;
      if (i >= tokens.kept) continue;
      const int32_t id = __ldg(tokens.ids + sample * tokens.kept + i);
      char* const all = tokens.is_token(id) ? call.all.row(sample, id) : nullptr;
      char* const part = call.part.row(sample, i);
      rows.sources[k] = call.to_all ? part : all;
      rows.targets[k] = call.to_all ? all : part;
    }
    rows.copy(teams, lane);
  }
}

// What a block knows of some tokens of a sample that come one after the other.
struct NamedTokens {
  int32_t* first;  // id that names each, INT_MAX: none
  int32_t* times;  // it is named

  // All threads of the block call it.
  __device__ void find(const KeptTokens& tokens, const int32_t* ids, int64_t begin,
                       int count) const {
    for (int i = int(threadIdx.x); i < count; i += kThreads) {
      first[i] = INT_MAX;
      times[i] = 0;
    }
    __syncthreads();
    for (int64_t i = threadIdx.x; i < tokens.kept; i += kThreads) {
      const int64_t place = int64_t(__ldg(ids + i)) - begin;
      if (uint64_t(place) >= uint64_t(count)) continue;
      atomicMin(first + place, int32_t(i));
      atomicAdd(times + place, 1);
    }
    __syncthreads();
  }
};

#include "random_ltd/tokens_math.inl"

struct NextOf {  // an id, among those of a sample
  const int32_t* ids;
  int32_t token, kept;

  DSX_HOST_DEVICE int32_t operator()(int32_t id) const {
    while (++id < kept) {
      if (ids[id] == token) return id;
    }
    return -1;
  }
};

// Tokens of a sample that a block has: few, so that there are many blocks, but as many as make
// looking at all ids a small part of it, 4 bytes of an id for 16 of a row.
constexpr int kMostTile = 1024;
int tile_of(int64_t kept, int64_t bytes) {
  int tile = 8;
  while (tile < kMostTile && tile * bytes < kept * 16) tile *= 2;
  return tile;
}

template <class S>
__global__ void __launch_bounds__(kThreads, kBlocks)
    merge_kernel(const __grid_constant__ MergeTokens call, const __grid_constant__ Teams teams,
                 int64_t blocks, unsigned of_sample, int tile) {
  __shared__ int32_t first[kMostTile], times[kMostTile];
  const NamedTokens named{first, times};
  const KeptTokens& tokens = call.tokens;
  const int lane = int(threadIdx.x) % teams.threads, team = int(threadIdx.x) / teams.threads;
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const int64_t sample = block / of_sample, begin = (block % of_sample) * tile;
    const int count = int(::min(int64_t(tile), tokens.tokens - begin));
    const int32_t* const ids = tokens.ids + sample * tokens.kept;
    __syncthreads();  // nobody reads what was known of the tokens before
    named.find(tokens, ids, begin, count);
    const auto is_sum = [&](int i) { return call.adds && named.times[i] > 1; };
    for (int from = team; from < count; from += S::kRows * teams.count()) {
      RowsOfTeam<S> rows;
#pragma unroll
      for (int k = 0; k < S::kRows; ++k) {
        const int i = from + k * teams.count();
        rows.sources[k] = rows.targets[k] = nullptr;
        if (i >= count || is_sum(i)) continue;
        const bool is_named = named.first[i] != INT_MAX;
        const TokenRows& source = is_named ? call.part : call.all;
        if (source.is_present()) {
          rows.sources[k] = source.row(sample, is_named ? int64_t(named.first[i]) : begin + i);
        }
        rows.targets[k] = call.out.row(sample, begin + i);
      }
      rows.copy(teams, lane);
    }
    for (int i = team; i < count; i += teams.count()) {
      if (!is_sum(i)) continue;
      const NextOf next{ids, int32_t(begin + i), int32_t(tokens.kept)};
      char* const out = call.out.row(sample, begin + i);
      for (int64_t e = lane; e < call.bytes / bytes_of(call.number); e += teams.threads) {
        add_numbers(call, sample, named.first[i], e, next, out);
      }
    }
  }
}

// What 16 has to divide where rows are made of whole words.
uint64_t bits_of(const TokenRows& rows) {
  return uint64_t(reinterpret_cast<uintptr_t>(rows.data)) | uint64_t(rows.of_sample) |
         uint64_t(rows.of_token);
}

// Calls body with the shape for such rows: many short ones, or one that gives a thread as much.
template <class Body>
void with_shape(uint64_t bits, int64_t bytes, const Body& body) {
  if (bits % sizeof(uint4) != 0) return body(Shifted{});
  if (bytes < 2048) return body(Shape<4, 1>{});
  body(Shape<1, 4>{});
}

unsigned grid_of(int64_t blocks) { return unsigned(std::min<int64_t>(blocks, INT_MAX)); }

}  // namespace

void move_tokens_cuda(const char* op, const MoveTokens& call, void* stream) {
  if (call.bytes == 0 || call.tokens.samples == 0 || call.tokens.kept == 0) return;
  cuda::check(cudaPeekAtLastError(), op);  // of somebody before
  const uint64_t bits = bits_of(call.all) | bits_of(call.part) | uint64_t(call.bytes);
  with_shape(bits, call.bytes, [&](auto shape) {
    using S = decltype(shape);
    const Teams teams(call.bytes, S::kWords);
    const int64_t of_sample = ceil_div(call.tokens.kept, int64_t(teams.count()) * S::kRows);
    const int64_t blocks = of_sample * call.tokens.samples;
    move_kernel<S><<<grid_of(blocks), kThreads, 0, cudaStream_t(stream)>>>(call, teams, blocks,
                                                                           unsigned(of_sample));
  });
  cuda::check(cudaGetLastError(), op);
}

void merge_tokens_cuda(const char* op, const MergeTokens& call, void* stream) {
  if (call.bytes == 0 || call.tokens.samples == 0 || call.tokens.tokens == 0) return;
  cuda::check(cudaPeekAtLastError(), op);
  const uint64_t bits =
      bits_of(call.all) | bits_of(call.part) | bits_of(call.out) | uint64_t(call.bytes);
  with_shape(bits, call.bytes, [&](auto shape) {
    using S = decltype(shape);
    const Teams teams(call.bytes, S::kWords);
    const int tile = tile_of(call.tokens.kept, call.bytes);
    const int64_t of_sample = ceil_div(call.tokens.tokens, tile);
    const int64_t blocks = of_sample * call.tokens.samples;
    merge_kernel<S><<<grid_of(blocks), kThreads, 0, cudaStream_t(stream)>>>(
        call, teams, blocks, unsigned(of_sample), tile);
  });
  cuda::check(cudaGetLastError(), op);
}

}  // namespace dsx
