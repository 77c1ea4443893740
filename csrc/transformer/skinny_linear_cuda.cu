// skinny_linear on CUDA. The length is cut into chunks, which are dealt in turn to 8 shares; a
// warp adds up the products of one share for a few rows of the weight, and the sums of the shares
// are added in their order. The blocks of a cluster have some shares each of the same rows of the
// weight, if those rows are too few to keep all processors busy, or so that each reads only a part
// of x. How many do, and how many rows a warp takes, makes no difference to any sum.
#include "transformer/skinny_linear.h"

#include <algorithm>

#include "transformer/skinny_linear_cuda.cuh"

namespace dsx {

#include "transformer/activation_math.inl"
#include "transformer/skinny_linear_math.inl"

namespace {

using cuda::kChunkBytes;
using cuda::kChunkElements;
using cuda::kPieces;
using cuda::kTileRows;
using cuda::kWarp;

constexpr const char* kOp = "skinny_linear";
constexpr int kShares = 8;
constexpr int kMostThreads = kShares * kWarp;
constexpr int kSlots = 6;    // of a thread: a tile and a chunk each, all but one under way
constexpr int kPadding = 4;  // floats, so that the threads of a warp store to different banks
constexpr int64_t kAskedBytes = 2048;  // of each row of the weight, before the kernel waits

// How the work is shared out; no sum depends on it.
struct Geometry {
  int cluster;  // blocks that have kShares / cluster shares each, of the same rows of the weight
  int groups;   // of tiles, for each of which a block has a warp for each of its shares
  int tiles;    // of a warp: 1, 2 or 4

  int shares() const { return kShares / cluster; }
  int threads() const { return shares() * groups * kWarp; }
  int rows() const { return groups * tiles * kTileRows; }  // of the weight, of a cluster
};

// Which rows of the weight a cluster has: consecutive ones, or half of them are gates and half what
// those gate.
struct WeightRows {
  int64_t first;  // column of the results
  int columns;    // results of each row of x

  __device__ WeightRows(const SkinnyLinear& call, int rows, unsigned cluster)
      : first(int64_t(cluster) * (call.gated ? rows / 2 : rows)),
        columns(call.gated ? rows / 2 : rows) {}

  // Row number i of the cluster; beyond the end of the weight, the last one again.
  __device__ int64_t row(const SkinnyLinear& call, int i) const {
    const bool is_up = i >= columns;
    const int64_t column = ::min(first + (is_up ? i - columns : i), call.columns - 1);
    return is_up ? call.columns + column : column;
  }
};

// What a thread fetches from the weight, slot by slot.
template <class T, int kTiles>
class Slots {
 public:
  __device__ Slots(const SkinnyLinear& call, const WeightRows& rows, int first_row, void* shared,
                   bool aligned)
      : length_(call.length), aligned_(aligned), slots_(static_cast<uint4*>(shared) + threadIdx.x) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int64_t row = rows.row(call, first_row + tile * kTileRows + seat_.row_of(r));
        rows_[tile][r] = call.weight.row<T>(row).address;
      }
    }
  }

  // Begins to fetch of a tile the chunk that begins at element k, if that is in the row.
  __device__ void fetch(int slot, int tile, int64_t k) {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      const int64_t from = k + seat_.byte_of(p) / int(sizeof(T));
      const T* row = rows_[tile][p % 2];
      uint4* near = place(slot, p);
      if (aligned_) {  // then the length is a multiple of 16 bytes, too
        if (from < length_) {
          cuda::fetch_bytes<16>(near, row + from);
        } else {
          *near = uint4{};
        }
      } else {
        *near = from < length_ ? cuda::load_piece_singly(row, from, length_) : uint4{};
      }
    }
  }

  __device__ void read(int slot, uint4 (&pieces)[kPieces]) const {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) pieces[p] = *place(slot, p);
  }

 private:
  __device__ uint4* place(int slot, int p) const {
    return slots_ + (slot * kPieces + p) * int(blockDim.x);
  }

  const int64_t length_;
  const bool aligned_;
  const cuda::Seat seat_;
  uint4* slots_;
  const T* rows_[kTiles][2];
};

// Asks for the beginnings of all rows of the cluster, of which this block has every so many.
template <class T>
__device__ void ask_for_weight(const SkinnyLinear& call, const WeightRows& rows, int count,
                               int64_t asked, int cluster) {
  const int64_t bytes = ::min(asked, call.length * int64_t(sizeof(T)));
  const int step = cluster * int(blockDim.x);
  for (int i = int(threadIdx.x) * cluster + int(cuda::rank_in_cluster()); i < count; i += step) {
    cuda::ask_for(call.weight.row<T>(rows.row(call, i)).address, uint32_t(bytes));
  }
}

// Stores what a warp has of one tile and of 8 rows of x: [row of x][row of the weight].
template <class Sums>
__device__ void store_sums(float* target, int row_pitch, const Sums& sums) {
  const cuda::Seat seat;
  float* at = target + 2 * seat.quarter * row_pitch + seat.row;
  at[0] = sums[0];
  at[row_pitch] = sums[1];
  at[8] = sums[2];
  at[row_pitch + 8] = sums[3];
}

// The total of one result, over the shares of all blocks of a cluster.
__device__ inline float total_of(const float* sums, int64_t share_pitch, int shares, int cluster) {
  float total = 0;
  for (int rank = 0; rank < cluster; ++rank) {
    for (int share = 0; share < shares; ++share) {
      total += cuda::read_in_cluster(sums + share * share_pitch, unsigned(rank));
    }
  }
  return total;
}

__device__ inline float element(const Rows& rows, int64_t row, int64_t i) {
  return cuda::load<cuda::Access::single, 1>(rows.row<Any>(row) + i, 1).lanes[0];
}

// Each block of the cluster finishes every so many results.
__device__ __noinline__ void finish(const SkinnyLinear& call, const WeightRows& rows,
                                    const float* sums, int row_pitch, int64_t share_pitch,
                                    int shares, int cluster) {
  using Float = cuda::Floats<1>;
  const int count = int(call.rows) * rows.columns;
  const int step = cluster * int(blockDim.x);
  for (int i = int(cuda::rank_in_cluster() * blockDim.x + threadIdx.x); i < count; i += step) {
    const int m = i / rows.columns, c = i % rows.columns;
    const int64_t column = rows.first + c;
    if (column >= call.columns) continue;
    const float* at = sums + m * row_pitch + c;
    float sum = total_of(at, share_pitch, shares, cluster), up = 0;
    if (call.gated) up = total_of(at + rows.columns, share_pitch, shares, cluster);
    if (call.bias.data != nullptr) {
      sum += element(call.bias, 0, column);
      if (call.gated) up += element(call.bias, 0, call.columns + column);
    }
    Float result = activated_sum(call, Float(sum), Float(up));
    if (call.residual.data != nullptr) result.lanes[0] += element(call.residual, m, column);
    cuda::store<cuda::Access::single>(call.out.row<Any>(m) + column, result, 1);
  }
}

template <class T, int kColumnTiles, int kTiles>
__global__ void __launch_bounds__(kMostThreads, kColumnTiles > 2 ? 1 : 2)
    skinny_linear_kernel(const __grid_constant__ SkinnyLinear call, Geometry geometry,
                         int64_t asked, bool aligned, bool x_aligned) {
  extern __shared__ __align__(16) uint4 shared[];
  const int shares = kShares / geometry.cluster;
  const int warp = int(threadIdx.x) / kWarp, group = warp / shares, share = warp % shares;
  const int count = geometry.groups * kTiles * kTileRows;
  const WeightRows rows(call, count, blockIdx.x / unsigned(geometry.cluster));

  cuda::let_next_begin();
  if (aligned && asked > 0) {
    ask_for_weight<T>(call, rows, count, asked, geometry.cluster);
  }
  cuda::wait_for_previous();

  // Chunk number i of this warp begins at element first + i * stride.
  const int64_t stride = kShares * kChunkElements<T>;
  const int64_t first = (int64_t(cuda::rank_in_cluster()) * shares + share) * kChunkElements<T>;
  const int64_t chunks = first < call.length ? ceil_div(call.length - first, stride) : 0;
  Slots<T, kTiles> slots(call, rows, group * kTiles * kTileRows, shared, aligned);
  cuda::Products<T, kColumnTiles, kTiles> products(call, x_aligned);
#pragma unroll
  for (int s = 0; s < kSlots - 1; ++s) {
    if (s / kTiles < chunks) slots.fetch(s, s % kTiles, first + s / kTiles * stride);
    cuda::end_fetches();
  }
  products.load_ahead(first);
  int slot = 0;
  for (int64_t i = 0; i < chunks; ++i) {
    const int64_t k = first + i * stride;
    products.begin(k);
    products.load_ahead(k + stride);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      constexpr int kAhead = kSlots - 1;
      cuda::wait_for_fetches<kSlots - 2>();
      uint4 pieces[kPieces];
      slots.read(slot, pieces);
      // The slot before this one has been read, and multiplied with.
      const int free = slot == 0 ? kAhead : slot - 1;
      const int later = (tile + kAhead) / kTiles;  // chunks
      if (i + later < chunks) slots.fetch(free, (tile + kAhead) % kTiles, k + later * stride);
      cuda::end_fetches();
      products.add(tile, pieces);
      slot = slot + 1 == kSlots ? 0 : slot + 1;
    }
  }

  cuda::wait_for_fetches<0>();
  __syncthreads();  // the slots are no longer needed
  float* sums = reinterpret_cast<float*>(shared);
  const int row_pitch = count + kPadding;
  const int64_t share_pitch = kColumnTiles * cuda::kColumnTile * int64_t(row_pitch);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
      float* target = sums + share * share_pitch + j * cuda::kColumnTile * row_pitch +
                      (group * kTiles + tile) * kTileRows;
      store_sums(target, row_pitch, products.sums(tile, j));
    }
  }
  cuda::meet_in_cluster(geometry.cluster);
  finish(call, rows, sums, row_pitch, share_pitch, shares, geometry.cluster);
  if (geometry.cluster > 1) cuda::meet_in_cluster(geometry.cluster);  // others still read
}

// How many tiles a warp may have, so that its sums fit into registers.
template <class T, int kColumnTiles>
constexpr int kMostTiles = std::is_same_v<T, float> ? 1
                           : kColumnTiles > 2       ? 2
                                                    : 4;

// As many tiles for a warp as leave a block for almost every processor; if even one tile leaves too
// few, blocks share rows. Many rows of x are read by a warp for each group of tiles: where shares
// are spread over a cluster, warps of a block read the same part.
Geometry geometry_of(const SkinnyLinear& call, int most_tiles, int64_t processors, bool clusters) {
  const int64_t tiles = ceil_div(call.columns * (call.gated ? 2 : 1), kTileRows);
  Geometry geometry{1, 1, 1};
  const auto keeps_busy = [&](int64_t blocks) { return 10 * blocks >= 9 * processors; };
  while (geometry.tiles < most_tiles && keeps_busy(ceil_div(tiles, 2 * geometry.tiles))) {
    geometry.tiles *= 2;
  }
  if (!clusters) return geometry;
  if (geometry.tiles > 1 && call.rows > 16) {
    geometry.cluster = geometry.groups = 4;
  }
  while (geometry.cluster < kShares && 2 * tiles * geometry.cluster <= processors) {
    geometry.cluster *= 2;
  }
  return geometry;
}

template <class T, int kColumnTiles, int kTiles>
void launch(const SkinnyLinear& call, const Geometry& geometry, int64_t asked, bool chained,
            cudaStream_t stream) {
  const int64_t slots = int64_t(geometry.threads()) * kSlots * kPieces * 16;
  const int64_t sums = int64_t(geometry.shares()) * kColumnTiles * cuda::kColumnTile *
                       (geometry.rows() + kPadding) * int64_t(sizeof(float));
  const int64_t columns = geometry.rows() / (call.gated ? 2 : 1);  // of a cluster
  const int64_t blocks = ceil_div(call.columns, columns) * geometry.cluster;
  const bool aligned = cuda::all_aligned({call.weight}) && call.length * sizeof(T) % 16 == 0;
  const bool x_aligned = cuda::all_aligned({call.x});
  const cuda::Launch how{unsigned(blocks), geometry.threads(), std::max(slots, sums),
                         geometry.cluster, chained};
  cuda::launch_kernel(&skinny_linear_kernel<T, kColumnTiles, kTiles>, how, stream, kOp, call,
                      geometry, asked, aligned, x_aligned);
}

template <class T, int kColumnTiles>
void launch_tiles(const SkinnyLinear& call, const Geometry& geometry, int64_t asked, bool chained,
                  cudaStream_t stream) {
  constexpr int kMost = kMostTiles<T, kColumnTiles>;
  if constexpr (kMost >= 4) {
    if (geometry.tiles == 4) {
      return launch<T, kColumnTiles, 4>(call, geometry, asked, chained, stream);
    }
  }
  if constexpr (kMost >= 2) {
    if (geometry.tiles == 2) {
      return launch<T, kColumnTiles, 2>(call, geometry, asked, chained, stream);
    }
  }
  launch<T, kColumnTiles, 1>(call, geometry, asked, chained, stream);
}

// Calls body with the storage type and the number of groups of 8 rows of x that the code is for.
template <class Body>
void with_kind(const SkinnyLinear& call, const Body& body) {
  const auto choose = [&](auto storage) {
    if (call.rows <= 8) return body(storage, std::integral_constant<int, 1>{});
    if (call.rows <= 16) return body(storage, std::integral_constant<int, 2>{});
    body(storage, std::integral_constant<int, 8>{});
  };
  if (call.x.dtype == Dtype::float32) return choose(float{});
  choose(cuda::Narrow{});
}

int attribute_of(cudaDeviceAttr attribute, int device) {
  int value = 0;
  cuda::check(cudaDeviceGetAttribute(&value, attribute, device), kOp);
  return value;
}

void check_capability(int device) {
  const int major = attribute_of(cudaDevAttrComputeCapabilityMajor, device);
  if (major >= 8) return;
  const int minor = attribute_of(cudaDevAttrComputeCapabilityMinor, device);
  throw std::runtime_error(std::string(kOp) + ": device has compute capability " +
                           std::to_string(major) + "." + std::to_string(minor) +
                           ", expected 8.0 or newer");
}

}  // namespace

void skinny_linear_cuda(const SkinnyLinear& call, void* stream) {
  int device = 0;
  cuda::check(cudaGetDevice(&device), kOp);
  check_capability(device);
  const int processors = attribute_of(cudaDevAttrMultiProcessorCount, device);
  with_kind(call, [&](auto storage, auto column_tiles) {
    using T = decltype(storage);
    constexpr int kColumnTiles = decltype(column_tiles)::value;
    const bool chained = cuda::can_chain(&skinny_linear_kernel<T, kColumnTiles, 1>, kOp);
    const Geometry geometry = geometry_of(call, kMostTiles<T, kColumnTiles>, processors, chained);
    launch_tiles<T, kColumnTiles>(call, geometry, chained ? kAskedBytes : 0, chained,
                                  cudaStream_t(stream));
  });
}

}  // namespace dsx
