// What blocks of threads of block_sparse_attention have in shared memory on CUDA, where tensor
// cores multiply: tiles of tokens, each row one token, made of pieces of the blocks that a list
// names.
#pragma once

#include "common/cuda/fetch.cuh"
#include "common/cuda/mma_tiles.cuh"
#include "attention/sparse/block_sparse_tasks_cuda.cuh"

namespace dsx::cuda {

// A warp has kRowTiles times 16 lanes; others come in tiles of kUnits units of 16 tokens. Pieces
// are blocks, or parts of them, of kBlockUnits units; kAtOnce of these are multiplied at once.
// Masks are read where pieces are the smallest, which any block has: registers have room there.
template <class Type, int kHeadWidth, int kOfLanes, int kOfPiece, int kTogether, int kOfTile>
struct SparseShape {
  using T = Type;
  static constexpr int kWidth = kHeadWidth, kRowTiles = kOfLanes;
  static constexpr int kBlockUnits = kOfPiece, kAtOnce = kTogether, kUnits = kOfTile;
  static constexpr bool kMasks = kBlockUnits == 1;
  static constexpr int kPieceTokens = 16 * kBlockUnits, kPieces = kUnits / kBlockUnits;
  static constexpr int kTokens = 16 * kUnits, kWarpLanes = 16 * kRowTiles;
  static constexpr int kMostThreads = 128 / kWarpLanes * 32;
  static constexpr int kSteps = kWidth / 16;  // of 16 elements
  static constexpr int kRowBytes = kWidth * 2, kChunks = kWidth / 8;
  static constexpr int kTileBytes = kTokens * kRowBytes;
  static_assert(kBlockUnits % kAtOnce == 0 && kUnits % kBlockUnits == 0);

  __device__ static int place_of(int row, int chunk) {
    return row * kRowBytes + ((chunk ^ (row & 7)) * 16);
  }
};

constexpr int kNoToken = INT32_MIN;

// The pieces of a tile; lane i of each warp has number i.
struct Pieces {
  int token;       // its first one; kNoToken: there is none
  uint32_t names;  // which blocks of the list's tile name it
};

template <class Shape>
__device__ inline int tiles_of(const TileList& list, int block) {
  return (list.count * (block / Shape::kPieceTokens) + Shape::kPieces - 1) / Shape::kPieces;
}

template <class Shape>
__device__ inline Pieces pieces_of(const TileList& list, int block, int tile) {
  const int lane = threadIdx.x % 32, shift = __ffs(block / Shape::kPieceTokens) - 1;
  const int number = tile * Shape::kPieces + lane, place = number >> shift;
  if (lane >= Shape::kPieces || place >= list.count) return {kNoToken, 0};
  const uint32_t entry = list.entries[place];
  const int part = number - (place << shift);
  return {int(entry >> 8) * block + part * Shape::kPieceTokens, entry & 0xff};
}

// The first element of a head, where a thread's chunk of a token is.
template <class T>
__device__ inline const char* head_of(const HeadTokens& tokens, int batch, int head) {
  const int64_t place = batch * tokens.of_batch + head * tokens.of_head;
  return reinterpret_cast<const char*>(static_cast<const T*>(tokens.data) + place);
}

// Begins to fetch a row of a token; what is not there becomes 0.
template <class Shape>
__device__ inline void fetch_row(const char* head, int64_t of_token, int width, int token,
                                 bool is_there, int row, int chunk, unsigned near) {
  int bytes = (width - chunk * 8) * 2;
  bytes = !is_there || bytes < 0 ? 0 : bytes > 16 ? 16 : bytes;
  const char* const far = bytes > 0 ? head + token * of_token * 2 + chunk * 16 : head;
  fetch_part(near + Shape::place_of(row, chunk), far, bytes);
}

// The lanes of a block of threads.
template <class Shape>
__device__ inline void fetch_lanes(const HeadTokens& from, int batch, int head, int first,
                                   int count, int tokens, int width, unsigned near) {
  const char* const source = head_of<typename Shape::T>(from, batch, head);
  for (int i = threadIdx.x; i < count * Shape::kChunks; i += blockDim.x) {
    const int row = i / Shape::kChunks, chunk = i % Shape::kChunks;
    fetch_row<Shape>(source, from.of_token, width, first + row, first + row < tokens, row, chunk,
                     near);
  }
}

// Begins to fetch the pieces of two arrays, the tile of the second one after that of the first.
// Nothing branches, and a thread has the same 16 bytes of each token: the many copies are cheap.
template <class Shape>
__device__ inline void fetch_pieces(const char* const (&heads)[2], const int64_t (&of_token)[2],
                                    const Pieces& pieces, int tokens, int width, unsigned near) {
  constexpr int kTogether = 2;  // rows; no block of threads has fewer
  const int chunk = threadIdx.x % Shape::kChunks, step = blockDim.x / Shape::kChunks;
  const unsigned most = chunk * 8 < width ? tokens : 0;
#pragma unroll 1
  for (int from = threadIdx.x / Shape::kChunks; from < Shape::kTokens; from += kTogether * step) {
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int row = from + i * step;
      const int first = __shfl_sync(0xffffffff, pieces.token, row / Shape::kPieceTokens);
      const int token = first + row % Shape::kPieceTokens;
      const bool is_there = unsigned(token) < most;
      const unsigned place = near + Shape::place_of(row, chunk);
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        const int64_t far = is_there ? token * of_token[which] * 2 + chunk * 16 : 0;
        fetch_part(place + which * Shape::kTileBytes, heads[which] + far, is_there ? 16 : 0);
      }
    }
  }
}

struct TwoNumbers {
  RowNumbers row[2];
};

__device__ inline TwoNumbers load_numbers(unsigned near) {
  TwoNumbers rows;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(rows.row[0].shift), "=f"(rows.row[0].delta), "=f"(rows.row[1].shift),
                 "=f"(rows.row[1].delta)
               : "r"(near));
  return rows;
}

// The lanes of a block of threads: a tile of a head.
struct LaneTile {
  int batch, head, first, tile;

  __device__ LaneTile(const SparseTask& task, int heads) {
    const int tiles = task.lists.tiles;
    const int number = int(blockIdx.x) % tiles, of_head = int(blockIdx.x) / tiles;
    batch = of_head / heads, head = of_head % heads;
    tile = number, first = tile * task.tile;
  }
};

// Bits of the rows of a warp's 16 lanes that are marked in one of the four threads of a row.
__device__ inline uint32_t rows_marked(bool low, bool high) {
  unsigned marks[2] = {__ballot_sync(0xffffffff, low), __ballot_sync(0xffffffff, high)};
  if ((marks[0] | marks[1]) == 0) return 0;
  uint32_t rows = 0;
  for (int i = 0; i < 8; ++i) {
    rows |= uint32_t((marks[0] >> 4 * i & 15) != 0) << i;
    rows |= uint32_t((marks[1] >> 4 * i & 15) != 0) << (i + 8);
  }
  return rows;
}

template <int kCount>
__device__ inline void set_to_0(float (&tiles)[kCount][4]) {
#pragma unroll
  for (auto& tile : tiles) {
#pragma unroll
    for (float& each : tile) each = 0;
  }
}

// sums += lanes times others: `from` is of 16 lanes, kept or where they are loaded from; others are
// rows, from `others` on.
template <class Shape, int kCount, class LoadLanes>
__device__ inline void multiply_rows(const LoadLanes& load, unsigned others,
                                     float (&sums)[kCount][4]) {
  const unsigned begin = begin_of_columns<Shape>(others);
#pragma unroll
  for (int step = 0; step < Shape::kSteps; ++step) {
    uint32_t lanes[4];
    load(step, lanes);
#pragma unroll
    for (int n = 0; n < kCount; n += 2) {
      uint32_t words[4];
      load_matrices<false>(words, further<Shape>(begin, n * 8, step));
      multiply_matrices<typename Shape::T>(sums[n], lanes, {words[0], words[1]});
      multiply_matrices<typename Shape::T>(sums[n + 1], lanes, {words[2], words[3]});
    }
  }
}

// sums += weights times others: of 16 lanes and kCount times 8 others, as many rows.
template <class Shape, int kCount, int kElements>
__device__ inline void add_rows(const float (&weights)[kCount][4], unsigned others,
                                float (&sums)[kElements][4]) {
  using T = typename Shape::T;
  const unsigned begin = begin_of_rows<Shape>(others);
#pragma unroll
  for (int step = 0; step < kCount / 2; ++step) {
    uint32_t lanes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float (&four)[4] = weights[2 * step + i / 2];
      lanes[i] = rounded_pair<T>(four[i % 2 * 2], four[i % 2 * 2 + 1]);
    }
#pragma unroll
    for (int n = 0; n < Shape::kSteps; ++n) {
      uint32_t words[4];
      load_matrices<true>(words, further<Shape>(begin, step * 16, n));
      multiply_matrices<T>(sums[2 * n], lanes, {words[0], words[1]});
      multiply_matrices<T>(sums[2 * n + 1], lanes, {words[2], words[3]});
    }
  }
}

// Stores row i (0, or 8 further down) of 16 lanes, each element times a factor. False: some are not
// finite.
template <class T, int kElements>
__device__ inline bool store_lane(T* to, int width, const float (&sums)[kElements][4], int i,
                                  float factor, bool is_there) {
  bool finite = true;
#pragma unroll
  for (int n = 0; n < kElements; ++n) {
    const float first = sums[n][2 * i] * factor, second = sums[n][2 * i + 1] * factor;
    const int place = n * 8 + threadIdx.x % 4 * 2;
    if (!is_there || place >= width) continue;
    finite = finite && ::fabsf(first) < INFINITY && ::fabsf(second) < INFINITY;
    *reinterpret_cast<uint32_t*>(to + place) = rounded_pair<T>(first, second);
  }
  return finite;
}

}  // namespace dsx::cuda
