// skinny_linear on CUDA. The length is cut into 4 shares, which are added in pairs; within a share
// products are added in their order. A warp adds up some shares for 16 rows of the weight, the
// blocks of a cluster and the groups of a block have some each; how many makes no difference to any
// sum. What lies near is described in skinny_linear_cuda.cuh.
#include "transformer/skinny_linear.h"

#include <algorithm>

#include "transformer/skinny_linear_products_cuda.cuh"

namespace dsx {

#include "common/activation_math.inl"
#include "common/few_rows_math.inl"

namespace {

using cuda::Barrier;
using cuda::Geometry;
using cuda::kBoxAlignment;
using cuda::kMostStages;
using cuda::kTileRows;
using cuda::kWarp;
using cuda::Maps;
using cuda::WeightRows;

constexpr const char* kOp = "skinny_linear";
constexpr int kCopiedAtOnce = 8 * 1024;  // bytes; less would keep the copy engine too busy

// The sums of a cluster, in shared memory: each block has those of some columns of the results,
// [splits][rows of x][parts][columns], a split being some shares of the length. What is worked out
// about their places comes before the products, when there is time.
struct Sums {
  float* all;
  int rows, columns, pitch, splits;

  __device__ Sums(char* shared, const SkinnyLinear& call, const Geometry& geometry)
      : all(reinterpret_cast<float*>(shared)),
        rows(int(call.rows)),
        columns(geometry.columns),
        pitch(geometry.sums_pitch),
        splits(geometry.cluster * geometry.groups) {}
};

// Where a thread writes what its warp has of a tile beside all rows of x: to whoever finishes it.
class Sender {
 public:
  __device__ Sender(const Sums& sums, const Geometry& geometry, const WeightRows& rows, int split,
                    int first_row)
      : cluster_(geometry.cluster), pitch_(sums.pitch) {
    const int lane = int(threadIdx.x) % kWarp, first = lane % 4 * 2;
    rows_ = sums.rows - first;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + lane / 4 + half * 8, part = row >= rows.columns;
      const int column = row - part * rows.columns;
      ranks_[half] = cluster_ > 1 ? column / sums.columns : 0;
      near_[half] = sums.all + (split * sums.rows + first) * pitch_ + part * sums.columns + column -
                    ranks_[half] * sums.columns;
    }
  }

  template <int kSums>
  __device__ void send(const float (&values)[kSums]) const {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const int half = i % 4 / 2, m = i / 4 * cuda::kColumnTile + i % 2;
      if (m >= rows_) continue;
      cuda::write_in_cluster(near_[half] + m * pitch_, cluster_, unsigned(ranks_[half]), values[i]);
    }
  }

 private:
  const int cluster_, pitch_;
  int rows_, ranks_[2];
  float* near_[2];
};

// Not in line, as it is long, and few calls have an activation.
__device__ __noinline__ float activated(const SkinnyLinear& call, float sum, float up) {
  return activated_sum(call, cuda::Floats<1>(sum), cuda::Floats<1>(up)).lanes[0];
}

// Makes results of the sums of the columns that a block finishes: a thread has one column, and
// every so many rows of x.
template <class T>
class Finisher {
 public:
  __device__ Finisher(const SkinnyLinear& call, const WeightRows& rows, const Sums& sums, int rank)
      : call_(call), sums_(sums), step_(int(blockDim.x) / sums.columns) {
    first_ = int(threadIdx.x) / sums.columns;
    const int c = int(threadIdx.x) - first_ * sums.columns;
    column_ = rows.first + rank * sums.columns + c;
    near_ = sums.all + first_ * sums.pitch + c;
    out_ = call.out.even_row<T>(first_).address + column_;
    if (first_ >= step_ || column_ >= call.columns) first_ = sums.rows;  // it has none
  }

  __device__ void finish() {
    for (int m = first_; m < sums_.rows; m += step_) {
      float result = total(near_) + element(call_.bias, 0, column_);
      if (call_.activated) {
        float up = 0;
        if (call_.gated) {
          up = total(near_ + sums_.columns) + element(call_.bias, 0, call_.columns + column_);
        }
        result = activated(call_, result, up);
      }
      *out_ = cuda::narrow<T>(result + element(call_.residual, m, column_));
      near_ += step_ * sums_.pitch;
      out_ += step_ * call_.out.pitch;
    }
  }

 private:
  // In pairs, as shares are added in a warp.
  __device__ float total(const float* first) const {
    static_assert(cuda::kShares == 4);
    const int split = sums_.rows * sums_.pitch;
    if (sums_.splits == 1) return first[0];
    if (sums_.splits == 2) return first[0] + first[split];
    return (first[0] + first[split]) + (first[2 * split] + first[3 * split]);
  }

  __device__ static float element(const Rows& rows, int64_t row, int64_t i) {
    return rows.data == nullptr ? 0.0f : cuda::widen(rows.row<T>(row).address[i]);
  }

  const SkinnyLinear& call_;
  const Sums& sums_;
  const int step_;
  int first_;
  int64_t column_;
  const float* near_;
  T* out_;
};

// What a warp that multiplies does: stage by stage, share by share.
template <class T, int kColumnTiles>
__device__ void multiply(cuda::Products<T, kColumnTiles>& products, const Geometry& geometry,
                         const WeightRows& rows, const char* ring, Barrier* here, Barrier* read,
                         float (&totals)[cuda::Products<T, kColumnTiles>::kSums]) {
  cuda::Pairwise<cuda::Products<T, kColumnTiles>::kSums> pairwise;
  int slot = 0, phase = 0;
  for (int share = 0; share < geometry.group_shares; ++share) {
    products.clear();
    for (int left = geometry.share_lines; left > 0; left -= geometry.lines) {
      const char* const near = ring + slot * geometry.stage_bytes;
      cuda::wait_for(here + slot, phase);
      for (int l = 0; l < ::min(left, geometry.lines); ++l) {
        products.add(near, l * rows.columns * cuda::kLineBytes,
                     l * geometry.x_rows * cuda::kLineBytes);
      }
      __syncwarp();
      if (threadIdx.x % kWarp == 0) cuda::arrive(read + slot);
      if (++slot == geometry.stages) slot = 0, phase ^= 1;
    }
    products.copy_sums(totals);
    pairwise.add(totals);
  }
}

template <class T, int kColumnTiles>
__global__ void __launch_bounds__(cuda::kMostThreads, kColumnTiles > 2 ? 1 : 2)
    skinny_linear_kernel(const __grid_constant__ SkinnyLinear call,
                         const __grid_constant__ Geometry geometry,
                         const __grid_constant__ Maps maps) {
  extern __shared__ __align__(16) char shared[];
  __shared__ Barrier here[kMostStages], read[kMostStages];
  char* const ring = reinterpret_cast<char*>(
      ceil_div(reinterpret_cast<uintptr_t>(shared), uintptr_t(kBoxAlignment)) * kBoxAlignment);
  const int rank = geometry.cluster > 1 ? int(cuda::rank_in_cluster()) : 0;
  const int warp = int(threadIdx.x) / kWarp, multiplying = geometry.groups * geometry.tiles;
  const WeightRows rows(call, geometry);

  cuda::let_next_begin();
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < geometry.stages; ++slot) {
      cuda::begin_barrier(here + slot, cuda::Copies<T>::arrivals(geometry));
      cuda::begin_barrier(read + slot, multiplying);
    }
    cuda::show_barriers();
  }
  __syncthreads();

  const bool copying = warp == multiplying;
  const int group = warp / geometry.tiles, first_row = warp % geometry.tiles * kTileRows;
  const Sums sums(ring, call, geometry);
  Finisher<T> finisher(call, rows, sums, rank);
  const Sender sender(sums, geometry, rows, rank * geometry.groups + group, first_row);
  float totals[cuda::Products<T, kColumnTiles>::kSums];
  if (copying) {
    const cuda::Copies<T> copies(call, geometry, maps, rows, ring, here);
    copies.ask_ahead(rank);
    cuda::wait_for_previous();
    int slot = 0, phase = 1;  // what has not begun counts as phase 1 that has ended
    for (int share = 0; share < geometry.group_shares; ++share) {
      for (int stage = 0; stage < geometry.share_stages; ++stage) {
        cuda::wait_for(read + slot, phase);
        copies.begin(rank, share, stage, slot);
        if (++slot == geometry.stages) slot = 0, phase ^= 1;
      }
    }
    __syncwarp();
  } else {
    cuda::Products<T, kColumnTiles> products(call, geometry, rows, first_row);
    multiply(products, geometry, rows, ring + group * geometry.group_bytes, here, read, totals);
    cuda::wait_for_previous();
  }
  cuda::meet_after_reading(geometry.cluster);  // the ring is no longer needed, in any block
  if (!copying) sender.send(totals);
  cuda::meet_in_cluster(geometry.cluster);
  finisher.finish();
}

struct Device {
  int processors = 0, shared_bytes = 0;

  Device() {
    int device = 0, major = 0, minor = 0;
    cuda::check(cudaGetDevice(&device), kOp);
    const auto read = [&](int& value, cudaDeviceAttr attribute) {
      cuda::check(cudaDeviceGetAttribute(&value, attribute, device), kOp);
    };
    read(major, cudaDevAttrComputeCapabilityMajor);
    read(minor, cudaDevAttrComputeCapabilityMinor);
    read(processors, cudaDevAttrMultiProcessorCount);
    read(shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    if (major >= 8) return;
    throw std::runtime_error(std::string(kOp) + ": the device has compute capability " +
                             std::to_string(major) + "." + std::to_string(minor) +
                             ", expected 8.0 or newer");
  }
};

// Blocks of a launch, whose clusters have so many tiles each.
int64_t blocks_of(int64_t tiles, int of_cluster, int cluster) {
  return ceil_div(tiles, int64_t(of_cluster)) * cluster;
}

// How many tiles make for the least work of the busiest processor.
int tiles_of_cluster(int64_t tiles, int most, int cluster, int processors) {
  int best = 1;
  int64_t least = INT64_MAX;
  for (int each = 1; each <= most; ++each) {
    const int64_t work = each * ceil_div(blocks_of(tiles, each, cluster), int64_t(processors));
    if (work <= least) least = work, best = each;
  }
  return best;
}

// So many warps for each row of the weight that processors are busy. They are in one block unless
// that would leave most processors without any, or each block with few rows beside many of x.
Geometry geometry_of(const SkinnyLinear& call, const Device& device, int line_elements,
                     bool chained) {
  Geometry geometry = {};
  const int64_t tiles = ceil_div(call.columns * (call.gated ? 2 : 1), kTileRows);
  const auto are_few = [&](int64_t blocks) { return 10 * blocks < 9 * device.processors; };
  int split = 1;
  while (split < cuda::kShares && are_few(tiles * split / 4)) split *= 2;
  geometry.cluster = chained && call.rows > 16 && split == cuda::kShares ? 2 : 1;
  while (chained && geometry.cluster < split && are_few(3 * tiles * geometry.cluster)) {
    geometry.cluster *= 2;
  }
  geometry.groups = split / geometry.cluster;
  geometry.tiles = tiles_of_cluster(tiles, cuda::kMostWarps / geometry.groups, geometry.cluster,
                                    device.processors);
  geometry.columns = geometry.rows() / (call.gated ? 2 : 1) / geometry.cluster;
  // So that the rows of x that the threads of a warp have are in different banks.
  geometry.sums_pitch = int(ceil_div(geometry.rows() / geometry.cluster, 16)) * 16 + 4;
  geometry.x_rows = int(ceil_div(call.rows, int64_t(cuda::kColumnTile))) * cuda::kColumnTile;
  geometry.share_lines =
      int(ceil_div(ceil_div(call.length, int64_t(line_elements)), int64_t(cuda::kShares)));
  int lines = call.rows > 16 ? 2 : 1;
  while (geometry.rows() * lines * cuda::kLineBytes < kCopiedAtOnce) lines *= 2;
  while (geometry.share_lines % lines != 0) lines /= 2;
  geometry.set_lines(lines);
  return geometry;
}

// As many stages as fit beside another block, if there is one.
void set_stages(Geometry& geometry, const Device& device, int64_t blocks) {
  const int room = device.shared_bytes - kBoxAlignment - 1024;  // for the barriers
  while (geometry.lines > 1 && 3 * geometry.stage_bytes > room) {
    geometry.set_lines(geometry.lines / 2);
  }
  const bool beside = blocks > device.processors && geometry.x_rows <= 16;  // see launch bounds
  const int budget = beside ? room / 2 - 1024 : room;
  const int fitting = std::clamp(budget / geometry.stage_bytes, 1, kMostStages);
  const int all = geometry.share_stages * geometry.group_shares;
  geometry.stages = std::clamp(all, 1, fitting);
  geometry.asked = std::min(geometry.share_stages, all / 16);
}

template <class T, int kColumnTiles>
void launch(const SkinnyLinear& call, const Device& device, cudaStream_t stream) {
  const auto kernel = &skinny_linear_kernel<T, kColumnTiles>;
  const bool chained = cuda::can_chain(kernel, kOp);
  Geometry geometry = geometry_of(call, device, cuda::kLineElements<T>, chained);
  const int columns = geometry.columns * geometry.cluster;
  const int64_t blocks = ceil_div(call.columns, int64_t(columns)) * geometry.cluster;
  set_stages(geometry, device, blocks);

  const auto matrix_of = [&](const Rows& rows, int64_t count) {
    const int64_t pitch = count > 1 ? rows.pitch : call.length;
    return cuda::Matrix{rows.data, count, call.length, pitch * int64_t(sizeof(T)), int(sizeof(T))};
  };
  const cuda::Matrix weight = matrix_of(call.weight, call.columns * (call.gated ? 2 : 1));
  const cuda::Matrix x = matrix_of(call.x, call.rows);
  Maps maps = {};
  geometry.by_engine = chained && call.x.group == 0 && cuda::fits_boxes(weight) &&
                       cuda::fits_boxes(x) &&
                       cuda::make_map(maps.weight, weight, columns, geometry.lines) &&
                       cuda::make_map(maps.x, x, geometry.x_rows, geometry.lines);
  geometry.weight_aligned = cuda::all_aligned({call.weight});
  geometry.x_aligned = cuda::all_aligned({call.x});

  const int64_t sums = int64_t(geometry.cluster * geometry.groups) * call.rows *
                       geometry.sums_pitch * int64_t(sizeof(float));
  const int64_t ring = int64_t(geometry.stages) * geometry.stage_bytes;
  const cuda::Launch how{unsigned(blocks), geometry.threads(), std::max(ring, sums) + kBoxAlignment,
                         geometry.cluster, chained};
  cuda::launch_kernel(kernel, how, stream, kOp, call, geometry, maps);
}

// Calls body with the number of groups of 8 rows of x that the code is for.
template <class Body>
void with_column_tiles(int64_t rows, const Body& body) {
  if (rows <= 8) return body(std::integral_constant<int, 1>{});
  if (rows <= 16) return body(std::integral_constant<int, 2>{});
  if (rows <= 32) return body(std::integral_constant<int, 4>{});
  body(std::integral_constant<int, 8>{});
}

}  // namespace

void skinny_linear_cuda(const SkinnyLinear& call, void* stream) {
  const Device device;
  with_storage_type(call.x.dtype, [&](auto storage) {
    with_column_tiles(call.rows, [&](auto tiles) {
      launch<decltype(storage), decltype(tiles)::value>(call, device, cudaStream_t(stream));
    });
  });
}

}  // namespace dsx
