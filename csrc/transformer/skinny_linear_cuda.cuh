// The products of skinny_linear on CUDA, of a warp: 16 rows of the weight, a tile, beside all rows
// of x, one chunk of the length at a time.
//
// Each thread fetches from the weight what it will itself multiply, so that nobody waits for
// anybody else: of a tile, 16 bytes of four places of a chunk. A chunk is 128 bytes of a row. Which
// elements of it a thread has is the order that the tensor cores take the rows of x in, too.
#pragma once

#include "common/cuda/chain.cuh"
#include "common/cuda/fetch.cuh"
#include "common/cuda/rows.cuh"
#include "transformer/skinny_linear.h"

namespace dsx::cuda {

constexpr int kTileRows = 16;   // of the weight
constexpr int kColumnTile = 8;  // rows of x, which are columns to the tensor cores
constexpr int kPieces = 4;      // of 16 bytes, that a thread has of a tile and a chunk
constexpr int kChunkBytes = 128;
template <class T>
constexpr int kChunkElements = kChunkBytes / int(sizeof(T));

// Where a thread is in the layout of the tensor cores: `row` and row + 8 of a tile; of each half of
// a chunk, 16 bytes from number 16 * quarter on.
struct Seat {
  int row, quarter;
  __device__ Seat() : row(int(threadIdx.x) % kWarp / 4), quarter(int(threadIdx.x) % 4) {}
  // Of piece number p: two rows of the first half of the chunk, then of the second.
  __device__ int row_of(int p) const { return row + p % 2 * 8; }
  __device__ int byte_of(int p) const { return p / 2 * (kChunkBytes / 2) + quarter * 16; }
};

// Elements of 16 bits, whichever of both kinds they are: only the tensor cores want to know.
using Narrow = uint16_t;

// 16 bytes of elements from number k on, one by one, with zeros beyond the end of the row.
template <class T>
__device__ __noinline__ uint4 load_piece_singly(const T* row, int64_t k, int64_t length) {
  constexpr int kCount = 16 / int(sizeof(T));
  Elements<T, kCount> elements{};
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (k + i < length) elements.lanes[i] = row[k + i];
  }
  uint4 piece;
  memcpy(&piece, &elements, sizeof(piece));
  return piece;
}
template <class T>
__device__ inline uint4 load_piece(const T* row, int64_t k, int64_t length, bool aligned) {
  if (aligned && k + 16 / int(sizeof(T)) <= length) return *reinterpret_cast<const uint4*>(row + k);
  return load_piece_singly(row, k, length);
}

// Adds 16 products to each of 16 x 8 sums.
__device__ inline void multiply_tile(float (&sums)[4], bool is_bfloat16, uint32_t a0, uint32_t a1,
                                     uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
#define DSX_MULTIPLY(type)                                                  \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type       \
               ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]) \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))
  if (is_bfloat16) {
    DSX_MULTIPLY("bf16");
  } else {
    DSX_MULTIPLY("f16");
  }
#undef DSX_MULTIPLY
#endif
}

// The sums of a warp, of kTiles tiles beside kColumnTiles times 8 rows of x: by the tensor cores,
// each of whose sums is that of its row and its column whatever the others are.
template <class T, int kColumnTiles, int kTiles>
class Products;

template <int kColumnTiles, int kTiles>
class Products<Narrow, kColumnTiles, kTiles> {
 public:
  __device__ Products(const SkinnyLinear& call, bool aligned) : call_(call), aligned_(aligned) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums_[tile][j][i] = 0;
      }
    }
  }

  // Loads of x what the chunk needs that begins at element k, or at least asks for it.
  __device__ void load_ahead(int64_t k) {
    if constexpr (kAhead) {
#pragma unroll
      for (int half = 0; half < 2; ++half) load_half(next_[half], k, half);
    }
  }

  // Goes on to that chunk.
  __device__ void begin(int64_t k) {
    if constexpr (kAhead) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j) now_[half][j] = next_[half][j];
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) load_half(now_[half], k, half);
    }
  }

  __device__ void add(int tile, const uint4 (&pieces)[kPieces]) {
    if (call_.x.dtype == Dtype::bfloat16) {
      add_of<true>(tile, pieces);
    } else {
      add_of<false>(tile, pieces);
    }
  }

  // Of the thread's row and of row + 8, beside columns 2 * quarter and one more: in this order the
  // first row's two, then the second's.
  __device__ const float (&sums(int tile, int j))[4] { return sums_[tile][j]; }

 private:
  static constexpr bool kAhead = kColumnTiles <= 2;

  template <bool kBFloat16>
  __device__ void add_of(int tile, const uint4 (&pieces)[kPieces]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 &a = pieces[2 * half], &b = pieces[2 * half + 1];
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
        if (j * kColumnTile >= call_.rows) continue;
        const uint4& x = now_[half][j];
        multiply_tile(sums_[tile][j], kBFloat16, a.x, b.x, a.y, b.y, x.x, x.y);
        multiply_tile(sums_[tile][j], kBFloat16, a.z, b.z, a.w, b.w, x.z, x.w);
      }
    }
  }

  __device__ void load_half(uint4 (&factors)[kColumnTiles], int64_t k, int half) {
    const int64_t from = k + seat_.byte_of(2 * half) / int(sizeof(Narrow));
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
      const int row = j * kColumnTile + seat_.row;
      factors[j] = uint4{};
      if (row < call_.rows && from < call_.length) {
        factors[j] = load_piece(call_.x.row<Narrow>(row).address, from, call_.length, aligned_);
      }
    }
  }

  const SkinnyLinear& call_;
  const bool aligned_;
  const Seat seat_;
  float sums_[kTiles][kColumnTiles][4];
  uint4 now_[2][kColumnTiles];
  uint4 next_[kAhead ? 2 : 1][kAhead ? kColumnTiles : 1];
};

// The same of floats, which the tensor cores would round: each thread has a quarter of each
// product's terms, in the order of the length, and quarters are added in the end.
template <int kColumnTiles, int kTiles>
class Products<float, kColumnTiles, kTiles> {
 public:
  __device__ Products(const SkinnyLinear& call, bool aligned) : call_(call), aligned_(aligned) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int m = 0; m < kColumns; ++m) sums_[tile][0][m] = sums_[tile][1][m] = 0;
    }
  }

  __device__ void load_ahead(int64_t /*k*/) {}
  __device__ void begin(int64_t k) { k_ = k; }

  __device__ void add(int tile, const uint4 (&pieces)[kPieces]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t from = k_ + seat_.byte_of(2 * half) / int(sizeof(float));
#pragma unroll
      for (int m = 0; m < kColumns; ++m) {
        if (m >= call_.rows) continue;
        uint4 x{};
        if (from < call_.length) {
          x = load_piece(call_.x.row<float>(m).address, from, call_.length, aligned_);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const uint4& w = pieces[2 * half + r];
          float& sum = sums_[tile][r][m];
          sum = __fmaf_rn(dsx::float_of(w.x), dsx::float_of(x.x), sum);
          sum = __fmaf_rn(dsx::float_of(w.y), dsx::float_of(x.y), sum);
          sum = __fmaf_rn(dsx::float_of(w.z), dsx::float_of(x.z), sum);
          sum = __fmaf_rn(dsx::float_of(w.w), dsx::float_of(x.w), sum);
        }
      }
    }
  }

  // As above. All threads of the warp call it together.
  struct Four {
    float of[4];
    __device__ float operator[](int i) const { return of[i]; }
  };
  __device__ Four sums(int tile, int j) {
    Four four{};
#pragma unroll
    for (int c = 0; c < kColumnTile; ++c) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float sum = sums_[tile][r][j * kColumnTile + c];
        sum += __shfl_xor_sync(0xffffffff, sum, 1);
        sum += __shfl_xor_sync(0xffffffff, sum, 2);
        if (c / 2 == seat_.quarter) four.of[2 * r + c % 2] = sum;
      }
    }
    return four;
  }

 private:
  static constexpr int kColumns = kColumnTiles * kColumnTile;

  const SkinnyLinear& call_;
  const bool aligned_;
  const Seat seat_;
  int64_t k_ = 0;
  float sums_[kTiles][2][kColumns];
};

}  // namespace dsx::cuda
