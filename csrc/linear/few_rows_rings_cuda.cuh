// Skinny GEMMs of codes beside up to 16 rows of x on CUDA 9.0: each warp brings its own lines of
// the weight near, through a ring that no other warp reads, so nobody waits for anybody but memory.
// x and scales come once and stay. Two blocks of a cluster have two split-K parts each; a warp adds
// up one of them, for one tile after the other, and sums meet as those of few_rows_kernel_cuda.cuh
// do, with the same bits. A block is small, so that the next kernel's begins beside it.
#pragma once

#include "linear/few_rows_kernel_cuda.cuh"

namespace dsx::cuda {

constexpr int kRingCluster = 2, kBlockParts = kSplitKParts / kRingCluster;
constexpr int kMostRingWarps = 16;
constexpr int kMostRingRows = 16;  // of x
constexpr int kRingStageBytes = kTileRows * kLineBytes;
// Of all rings of a block, about: 64 KiB on their way keep memory busy, and leave room for another
// block. A ring has no more than kMostRingStages.
constexpr int kRingStages = 32, kMostRingStages = 8;
constexpr int kMostBox = 256;  // rows, or lines, that the copy engine brings at once

// Beside Geometry, of which stages and steps mean nothing here: its places count from the end of
// the rings.
struct Rings {
  int warps, slots;  // slots: tiles that warps have at a time
  int stages;        // of a ring, each a line of a tile
  int scale_rows;    // near
  int sums_place;

  DSX_HOST_DEVICE int bytes() const { return warps * stages * kRingStageBytes; }
};

// The lines of the weight that a warp multiplies, in their order, as one of its threads asks for
// them and copies them.
template <class Kind>
class RingCopies {
 public:
  __device__ RingCopies(const typename Kind::Call& call, const Geometry& geometry,
                        const Rings& rings, const CUtensorMap& weight, const WeightRows& rows,
                        int slot, int part)
      : geometry_(geometry),
        rings_(rings),
        weight_(weight),
        gates_(rows.columns),
        before_(int(rows.begin(call, 0))),
        skipped_(int(call.columns) - rows.columns),
        first_line_(part * geometry.k_part_lines),
        tile_(slot) {}

  __device__ bool is_done() const { return tile_ >= geometry_.tiles; }

  // What may be done before anything may be read.
  __device__ void ask_ahead() const {
    RingCopies ahead = *this;
#pragma unroll 1  // instructions are read from memory, too
    for (int i = 0; i < kAsked && !ahead.is_done(); ++i) {
      ask_for_tma_tiles(weight_, ahead.row(), ahead.first_line_ + ahead.line_);
      ahead.advance();
    }
  }

  // Begins to copy the next line.
  __device__ void begin(char* ring, Barrier* here) {
    arrive_expecting(here + stage_, kRingStageBytes);
    fetch_tma_tiles(ring + stage_ * kRingStageBytes, weight_, row(), first_line_ + line_,
                    here + stage_, policy_);
    if (++stage_ == rings_.stages) stage_ = 0;
    advance();
    if (is_done()) let_next_begin();  // earlier, its copies would compete with those of this kernel
  }

 private:
  // More would be thrown out of the cache again before it is read.
  static constexpr int kAsked = 2;

  // A tile is one of gates or of what those gate.
  __device__ int row() const {
    const int row = tile_ * kTileRows;
    return before_ + row + (row >= gates_ ? skipped_ : 0);
  }
  __device__ void advance() {
    if (++line_ == geometry_.k_part_lines) line_ = 0, tile_ += rings_.slots;
  }

  const Geometry& geometry_;
  const Rings& rings_;
  const CUtensorMap& weight_;
  const uint64_t policy_ = read_once();
  const int gates_, before_, skipped_, first_line_;
  int tile_, line_ = 0, stage_ = 0;
};

// Begins to copy all of x and all scales that a block needs: by one warp.
template <class Kind>
__device__ void copy_what_stays(const typename Kind::Call& call, const Geometry& geometry,
                                const Rings& rings, const Maps<true>& maps, const WeightRows& rows,
                                int first_line, char* near, Barrier* here) {
  const int lane = int(threadIdx.x) % kWarp, lines = kBlockParts * geometry.k_part_lines;
  if (lane == 0) {
    const int scales = rings.scale_rows * rows.columns * int(sizeof(float));
    arrive_expecting(
        here, geometry.x_rows * lines * Kind::kXLines * kLineBytes + geometry.scale_tiles * scales);
    fetch_tma_tiles(near + geometry.x_place, maps.x, 0, first_line * Kind::kXLines, here);
  }
  __syncwarp();  // bytes are announced before they arrive
  if (lane >= geometry.scale_tiles) return;
  const bool second = rows.parts > 1 && lane % 2 == 1, offsets = lane >= rows.parts;
  fetch_tile(near + geometry.scale_place + lane * geometry.scale_step,
             offsets ? maps.offsets : maps.scales, int(rows.begin(call, second)),
             Kind::scales(call).group_of(first_line), here, read_once());
}

// Blocks that fit beside each other whatever their number of warps is: with so few registers as
// the most common products can do with.
template <class Kind, int kColumnTiles>
constexpr int kRingBlocks = kColumnTiles == 1 && !Kind::kOffsets ? 2 : 1;

template <class Kind, int kColumnTiles>
__global__ void __launch_bounds__(kMostRingWarps* kWarp, (kRingBlocks<Kind, kColumnTiles>))
    few_rows_rings_kernel(const __grid_constant__ typename Kind::Call call,
                          const __grid_constant__ Geometry geometry,
                          const __grid_constant__ Rings rings,
                          const __grid_constant__ Maps<true> maps) {
  using Products = typename Kind::template Products<kColumnTiles>;
  extern __shared__ __align__(16) char shared[];
  __shared__ Barrier barriers[kRingStages + kMostRingWarps / 2], stays;
  __shared__ float inverses[kMostRingRows];
  char* const pipeline = reinterpret_cast<char*>(
      ceil_div(reinterpret_cast<uintptr_t>(shared), uintptr_t(kTmaTileAlignment)) *
      kTmaTileAlignment);
  char* const near = pipeline + rings.bytes();
  const int rank = int(rank_in_cluster());
  const int warp = __shfl_sync(0xffffffff, int(threadIdx.x) / kWarp, 0);  // the same for all
  const int lane = int(threadIdx.x) % kWarp, slot = warp / kBlockParts;
  const int part = rank * kBlockParts + warp % kBlockParts;
  const int first_line = rank * kBlockParts * geometry.k_part_lines;
  const Share share{0, 0, int(call.rows)};
  const WeightRows rows(call, geometry, share, blockIdx.x / kRingCluster);
  char* const ring = pipeline + warp * rings.stages * kRingStageBytes;
  Barrier* const here = barriers + warp * rings.stages;
  RingCopies<Kind> copies(call, geometry, rings, maps.weight, rows, slot, part);

  if (lane == 0) {
#pragma unroll 1
    for (int i = 0; i < rings.stages; ++i) begin_barrier(here + i, 1);
    if (warp == 0) begin_barrier(&stays, 1);
    show_barriers();
    if (warp == 0) ask_for_maps(geometry, maps);
    copies.ask_ahead();
  }
  come_to_cluster();
  wait_for_previous();
  if (warp == 0) copy_what_stays<Kind>(call, geometry, rings, maps, rows, first_line, near, &stays);
  if (lane == 0) {
#pragma unroll 1
    for (int i = 0; i < rings.stages && !copies.is_done(); ++i) copies.begin(ring, here);
  }
  if (call.squares.is_present() && call.inverses == nullptr) {  // while data is on its way
    find_inverses<(kColumnTiles > 1 ? 4 : 2)>(call, inverses, warp, rings.warps);
  }
  __syncthreads();  // the barrier of what stays has begun
  wait_for(&stays, 0);

  const Sums sums(near + rings.sums_place, share, geometry);
  const unsigned stay = shared_address(near);
  // Kept in registers: what they are worked out of takes long to read.
  unsigned ring_at = shared_address(ring), here_at = shared_address(here);
  asm volatile("" : "+r"(ring_at), "+r"(here_at));
  int stage = 0, phase = 0;
  bool met = false;
#pragma unroll 1
  for (int tile = slot; tile < geometry.tiles; tile += rings.slots) {
    Products products(call, geometry, rows, tile * kTileRows, lane % kTileRows);
    int number = part * geometry.k_part_lines;
#pragma unroll 1
    for (int left = geometry.k_part_lines; left > 0; --left, ++number) {
      wait_for(here_at + unsigned(stage) * unsigned(sizeof(Barrier)), phase);
      products.add(ring_at + unsigned(stage * kRingStageBytes), stay, number - first_line, number);
      __syncwarp();
      if (lane == 0 && !copies.is_done()) copies.begin(ring, here);
      if (++stage == rings.stages) stage = 0, phase ^= 1;
    }
    float totals[Products::kSums];
    products.copy_sums(totals);
    if (!met) wait_for_cluster();  // the other block is there, whose memory is written
    met = true;
    Sender(sums, geometry, rows, part, tile * kTileRows).send(totals);
  }
  if (!met) wait_for_cluster();
  cluster_barrier(kRingCluster);
  Finisher<typename Kind::T> finisher(call, geometry, rows, sums, rank);
  finisher.finish(call.inverses == nullptr ? inverses : call.inverses);
}

// Scales that are near: of all groups that some lines begin or go on with.
inline int scale_rows_of(const Scales& scales, int lines) {
  if (scales.group_lines == 1) return lines * scales.line_parts;
  return std::min(lines, (lines - 1) / scales.group_lines + 2);
}

// How many tiles a cluster has, then as few warps as work on them no longer than all would.
template <class Kind, int kColumnTiles>
Rings divide_among_rings(Geometry& geometry, const typename Kind::Call& call,
                         const Device& device) {
  constexpr int kMostSlots = kMostRingWarps / kBlockParts;
  const int64_t tiles = ceil_div(call.weight_rows(), kTileRows);
  geometry.cluster = kRingCluster, geometry.groups = kBlockParts;  // as Sums has them
  // Scales of gates, and of what those gate, come in a box each.
  const int parts = call.gated ? 2 : 1, most = parts * kMostBox / kTileRows;
  geometry.tiles = tiles_of_cluster(tiles, parts, most, kRingCluster, device.processors);
  Rings rings = {};
  const int turns = ceil_div(geometry.tiles, kMostSlots);
  rings.slots = ceil_div(geometry.tiles, turns);
  rings.warps = rings.slots * kBlockParts;
  rings.stages = std::min((kRingStages + rings.warps / 2) / rings.warps, kMostRingStages);
  set_places<Kind, kColumnTiles>(geometry, call, rings.warps * kWarp);
  return rings;
}

// Returns how many bytes a block needs.
template <class Kind>
int64_t set_near(Geometry& geometry, Rings& rings, const typename Kind::Call& call) {
  const int lines = kBlockParts * geometry.k_part_lines, columns = geometry.columns * kRingCluster;
  const auto aligned = [](int64_t bytes) { return ceil_div(bytes, kLineBytes) * kLineBytes; };
  rings.scale_rows = scale_rows_of(Kind::scales(call), lines);
  const int64_t x = int64_t(lines) * Kind::kXLines * geometry.x_rows * kLineBytes;
  const int64_t scales = aligned(int64_t(rings.scale_rows) * columns * sizeof(float));
  const int64_t before_sums = x + geometry.scale_tiles * scales;
  geometry.x_place = 0, geometry.scale_place = int(x), geometry.scale_step = int(scales);
  rings.sums_place = int(before_sums);
  const int64_t sums = kSplitKParts * call.rows * geometry.sums_pitch * int64_t(sizeof(float));
  return rings.bytes() + before_sums + sums + kTmaTileAlignment;
}

// Does nothing and returns false if it cannot, as where half of x is too large to stay near, or if
// there are too few rows of the weight for all processors.
template <class Kind, int kColumnTiles>
bool launch_in_rings(const typename Kind::Call& call, const Device& device, cudaStream_t stream,
                     const char* op) {
  static_assert(kColumnTiles * kColumnTile <= kMostRingRows);
  const auto kernel = &few_rows_rings_kernel<Kind, kColumnTiles>;
  if (!can_chain(kernel, op)) return false;
  if (ceil_div(call.weight_rows(), kTileRows) * kRingCluster < device.processors) return false;
  // Places that are worked out below fit 32 bits.
  if (Kind::weight(call).length > int64_t(kMostBox) * kLineBytes) return false;
  Geometry geometry = {};
  Rings rings = divide_among_rings<Kind, kColumnTiles>(geometry, call, device);
  const int64_t bytes = set_near<Kind>(geometry, rings, call);
  constexpr int kBeside = 1024;  // for barriers and inverses
  if (bytes > device.shared_of_block - kBeside) return false;
  const int lines = kBlockParts * geometry.k_part_lines;
  Maps<true> maps = {};
  Boxes boxes = {kTileRows, 1, geometry.x_rows, lines * Kind::kXLines, rings.scale_rows, 0};
  boxes.scale_columns = geometry.columns * kRingCluster;
  if (boxes.x_lines > kMostBox || boxes.scale_rows > kMostBox) return false;
  geometry.by_engine = make_maps<Kind>(maps, call, boxes);
  if (!geometry.by_engine) return false;
  const int64_t blocks = blocks_of(call.columns, boxes.scale_columns, kRingCluster);
  // Where the next block can only begin when one has ended, memory would have nothing to do.
  const bool few_registers = kRingBlocks<Kind, kColumnTiles> > 1 || rings.warps <= 8;
  const bool overlap =
      few_registers && 2 * (bytes + kBeside + device.shared_reserved) <= device.shared_of_processor;
  if (blocks > device.processors && !overlap) return false;
  const Launch how{unsigned(blocks), rings.warps * kWarp, bytes, kRingCluster, true};
  launch_inverses(call, stream, op);
  launch_kernel(kernel, how, stream, op, call, geometry, rings, maps);
  return true;
}

}  // namespace dsx::cuda
