// Rows of tokens on CUDA. A team of threads has a row, of which many are under way together; what
// is written goes past the cache.
#include "random_ltd/tokens.h"

#include <algorithm>
#include <climits>
#include <cstring>

#include "common/cuda/check.h"
#include "common/cuda/words.cuh"
#include "common/math.h"

namespace dsx {
namespace {

constexpr int kThreads = 256;
constexpr int kTogether = 8;  // rows of a team that are under way together

// How rows of so many words are cut among the threads of a block.
struct Teams {
  int64_t words;
  int threads = 1;  // of a team, a power of two

  explicit Teams(int64_t of_row) : words(of_row) {
    while (threads < kThreads && threads < words) threads *= 2;
  }
  DSX_HOST_DEVICE int count() const { return kThreads / threads; }
};

// Where some rows come from, and where they go; null: zeros, and nowhere.
template <class Word>
struct RowsOfTeam {
  const Word* sources[kTogether];
  Word* targets[kTogether];

  __device__ void copy(int64_t words, int lane, int threads) const {
    for (int64_t i = lane; i < words; i += threads) {
      Word values[kTogether];
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        values[k] = sources[k] == nullptr ? Word{} : sources[k][i];
      }
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        if (targets[k] != nullptr) cuda::store_streamed(targets[k] + i, values[k]);
      }
    }
  }
};

template <class Word>
__device__ Word* words_of(const TokenRows& rows, int64_t sample, int64_t token) {
  return reinterpret_cast<Word*>(rows.row(sample, token));
}

// A block has some ids of a sample.
template <class Word>
__global__ void __launch_bounds__(kThreads)
    move_kernel(const __grid_constant__ MoveTokens call, const __grid_constant__ Teams teams,
                int64_t blocks, unsigned of_sample) {
  const KeptTokens& tokens = call.tokens;
  const int lane = int(threadIdx.x) % teams.threads, team = int(threadIdx.x) / teams.threads;
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const int64_t sample = block / of_sample;
    const int64_t first = (block % of_sample) * teams.count() * kTogether + team;
    RowsOfTeam<Word> rows;
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const int64_t i = first + k * teams.count();
      rows.sources[k] = rows.targets[k] = nullptr;
      if (i >= tokens.kept) continue;
      const int32_t id = __ldg(tokens.ids + sample * tokens.kept + i);
      Word* const all =
          tokens.is_token(id) ? words_of<Word>(call.all, sample, id) : static_cast<Word*>(nullptr);
      Word* const part = words_of<Word>(call.part, sample, i);
      rows.sources[k] = call.to_all ? part : all;
      rows.targets[k] = call.to_all ? all : part;
    }
    rows.copy(teams.words, lane, teams.threads);
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
// looking at all ids a small part of it.
constexpr int kMostTile = 1024;
int tile_of(int64_t kept) {
  int tile = 32;
  while (tile < kMostTile && tile * 16 < kept) tile *= 2;
  return tile;
}

template <class Word>
__global__ void __launch_bounds__(kThreads)
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
    for (int from = team; from < count; from += kTogether * teams.count()) {
      RowsOfTeam<Word> rows;
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        const int i = from + k * teams.count();
        rows.sources[k] = rows.targets[k] = nullptr;
        if (i >= count || is_sum(i)) continue;
        const bool is_named = named.first[i] != INT_MAX;
        const TokenRows& source = is_named ? call.part : call.all;
        if (source.is_present()) {
          rows.sources[k] =
              words_of<Word>(source, sample, is_named ? int64_t(named.first[i]) : begin + i);
        }
        rows.targets[k] = words_of<Word>(call.out, sample, begin + i);
      }
      rows.copy(teams.words, lane, teams.threads);
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

// What a word has to divide.
uint64_t bits_of(const TokenRows& rows) {
  return uint64_t(reinterpret_cast<uintptr_t>(rows.data)) | uint64_t(rows.of_sample) |
         uint64_t(rows.of_token);
}

unsigned grid_of(int64_t blocks) { return unsigned(std::min<int64_t>(blocks, INT_MAX)); }

}  // namespace

void move_tokens_cuda(const char* op, const MoveTokens& call, void* stream) {
  if (call.bytes == 0 || call.tokens.samples == 0 || call.tokens.kept == 0) return;
  cuda::check(cudaPeekAtLastError(), op);  // of somebody before
  const uint64_t bits = bits_of(call.all) | bits_of(call.part) | uint64_t(call.bytes);
  cuda::with_word(bits, [&](auto word) {
    using Word = decltype(word);
    const Teams teams(call.bytes / int64_t(sizeof(Word)));
    const int64_t of_sample = ceil_div(call.tokens.kept, int64_t(teams.count()) * kTogether);
    const int64_t blocks = of_sample * call.tokens.samples;
    move_kernel<Word><<<grid_of(blocks), kThreads, 0, cudaStream_t(stream)>>>(call, teams, blocks,
                                                                              unsigned(of_sample));
  });
  cuda::check(cudaGetLastError(), op);
}

void merge_tokens_cuda(const char* op, const MergeTokens& call, void* stream) {
  if (call.bytes == 0 || call.tokens.samples == 0 || call.tokens.tokens == 0) return;
  cuda::check(cudaPeekAtLastError(), op);
  const uint64_t bits =
      bits_of(call.all) | bits_of(call.part) | bits_of(call.out) | uint64_t(call.bytes);
  cuda::with_word(bits, [&](auto word) {
    using Word = decltype(word);
    const Teams teams(call.bytes / int64_t(sizeof(Word)));
    const int tile = tile_of(call.tokens.kept);
    const int64_t of_sample = ceil_div(call.tokens.tokens, tile);
    const int64_t blocks = of_sample * call.tokens.samples;
    merge_kernel<Word><<<grid_of(blocks), kThreads, 0, cudaStream_t(stream)>>>(
        call, teams, blocks, unsigned(of_sample), tile);
  });
  cuda::check(cudaGetLastError(), op);
}

}  // namespace dsx
