// Skinny GEMMs of codes in groups of 128 beside up to 16 rows of x, on compute capability 9.0 and
// newer: each warp brings its own lines of the weight near, through a ring that no other warp
// reads, so nobody waits for anybody but memory. x and scales come once and stay. Two blocks of a
// cluster have two split-K parts each; a warp adds up one of them, for one tile after the other,
// and sums meet as those of few_rows_kernel_cuda.cuh do, with the same bits. A block is small, so
// that the next kernel's begins beside it, and so is the code before its first copy, which nothing
// hides.
#pragma once

#include "linear/few_rows_kernel_cuda.cuh"
#include "linear/quantized_products_cuda.cuh"

namespace dsx::cuda {

constexpr int kRingCluster = 2, kBlockParts = kSplitKParts / kRingCluster;
constexpr int kMostRingWarps = 16;
constexpr int kMostRingRows = 16;  // of x
constexpr int kRingStageBytes = kTileRows * kLineBytes;
// Of all rings of a block, about: 64 KiB on their way keep memory busy, and leave room for another
// block. A ring has no more than kMostRingStages.
constexpr int kRingStages = 32, kMostRingStages = 8;
constexpr int kMostBox = 256;  // rows, or lines, that the copy engine brings at once
constexpr int kTogether = 2;   // rows of which a warp finds inverses
constexpr int kMostRingTiles = 2 * kMostBox / kTileRows;  // of a cluster, scales in two boxes

// Beside Geometry, of which stages and steps mean nothing here: its places count from the end of
// the rings. All that the kernel has to know of its call, as long as sums are the results:
// parameters are read from memory, 64 bytes at a time, so few of them are quick.
struct Rings {
  int warps, slots;  // slots: tiles that warps have at a time
  int stages;        // of a ring, each a line of a tile
  int bytes;         // of all rings
  int spare;         // warps that multiply nothing
  // So many warps, from first_finder on, find what sums take for the norm before the layer.
  int finders, first_finder;
  int x_bytes;
  int sums_place;
  int lines;           // of a row of the weight
  int rows;            // of x
  int parts, columns;  // of the weight that a cluster has, and of each
  // Scales come in boxes of so many bytes, for so many rows of the weight each, of which the second
  // ones begin so many further.
  int boxes, box_bytes, box_columns;
  int box_step;
  int skipped;           // rows of the weight between the gates of a cluster and what they gate
  int64_t call_columns;  // of all clusters
  Rows out;

  int threads() const { return (warps + spare) * kWarp; }
};

// The lines of the weight that a warp multiplies, in their order, as one of its threads asks for
// them and copies them.
class RingCopies {
 public:
  // `lines` of each tile, from that one of the weight on; rings and barriers of the block.
  __device__ RingCopies(const Geometry& geometry, const Rings& rings, const CUtensorMap& weight,
                        const WeightRows& rows, int slot, int first_line, int lines, unsigned ring,
                        unsigned barriers)
      : rings_(rings),
        weight_(weight),
        tiles_(geometry.tiles),
        lines_(lines),
        before_(int(rows.first)),
        first_line_(first_line),
        ring_(ring),
        barriers_(barriers),
        tile_(lines > 0 ? slot : tiles_),
        is_last_(slot == 0) {
    // Now, and not when they are needed.
    asm volatile("" : "+r"(before_), "+r"(first_line_), "+r"(ring_), "+r"(barriers_), "+r"(tile_));
  }

  __device__ bool is_done() const { return tile_ >= tiles_; }

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
  __device__ void begin() {
    const unsigned barrier = barriers_ + unsigned(stage_) * unsigned(sizeof(Barrier));
    arrive_expecting(barrier, kRingStageBytes);
    fetch_tma_tiles(ring_ + unsigned(stage_ * kRingStageBytes), weight_, row(), first_line_ + line_,
                    barrier, policy_);
    if (++stage_ == rings_.stages) stage_ = 0;
    advance();
    // Of a block the first call counts. Earlier, its copies would compete with those of this
    // kernel.
    if (is_last_ && is_done()) let_next_begin();
  }

 private:
  // More would be thrown out of the cache again before it is read.
  static constexpr int kAsked = 2;

  // A tile is one of gates or of what those gate.
  __device__ int row() const {
    const int row = tile_ * kTileRows;
    return before_ + row + (row >= rings_.columns ? rings_.skipped : 0);
  }
  __device__ void advance() {
    if (++line_ == lines_) line_ = 0, tile_ += rings_.slots;
  }

  const Rings& rings_;
  const CUtensorMap& weight_;
  const uint64_t policy_ = read_once();
  const int tiles_, lines_;
  int before_, first_line_;
  unsigned ring_, barriers_;
  int tile_, line_ = 0, stage_ = 0;
  const bool is_last_;  // no other warp of the block has more tiles
};

// Begins to copy all of x that a block needs: by one thread.
template <class Kind>
__device__ void copy_x(const Geometry& geometry, const Rings& rings, const CUtensorMap& map,
                       int first_line, unsigned near, Barrier* here) {
  arrive_expecting(here, rings.x_bytes);
  fetch_tma_tiles(near + unsigned(geometry.x_place), map, 0, first_line * Kind::kXLines, here);
}

// The same of all scales and offsets.
template <class Kind>
__device__ void copy_scales(const Geometry& geometry, const Rings& rings, const Maps<true>& maps,
                            int first_row, int first_line, unsigned near, Barrier* here) {
  const uint64_t policy = read_once();
  near += unsigned(geometry.scale_place);
  arrive_expecting(here, geometry.scale_tiles * rings.box_bytes);
#pragma unroll 1
  for (int i = 0; i < geometry.scale_tiles; ++i) {
    const bool offsets = Kind::kOffsets && i >= rings.boxes;
    const int box = offsets ? i - rings.boxes : i;
    fetch_tile(near, offsets ? maps.offsets : maps.scales, first_row + box * rings.box_step,
               first_line * Kind::kGroups, here, policy);
    near += unsigned(geometry.scale_step);
  }
}

// What a Finisher does, where sums are the results, of columns from `first` on.
template <class T>
__device__ void finish_sums(const Geometry& geometry, const Rings& rings, const Sums& sums,
                            int64_t first) {
  int m = geometry.rank_of(int(threadIdx.x));
  const int c = int(threadIdx.x) - m * sums.columns, step = geometry.finished_rows;
  if (m >= step || first + c >= rings.call_columns) return;
  const float* near = sums.all + m * sums.pitch + c;
  T* out = rings.out.even_row<T>(m).address + first + c;
  for (; m < rings.rows; m += step) {
    *out = narrow<T>(sums.total(near) + 0.0f);  // as with no bias: never -0
    near += step * sums.pitch;
    out += step * rings.out.pitch;
  }
}

// Blocks that fit beside each other whatever their number of warps is: with so few registers as
// the most common products can do with.
template <class Kind, int kColumnTiles>
constexpr int kRingBlocks = kColumnTiles == 1 && !Kind::kOffsets ? 2 : 1;

struct Nothing {};

// call: what a Finisher needs, or Nothing where sums are the results.
template <class Kind, int kColumnTiles, class Call>
__global__ void __launch_bounds__(kMostRingWarps* kWarp, (kRingBlocks<Kind, kColumnTiles>))
    few_rows_rings_kernel(const __grid_constant__ Geometry geometry,
                          const __grid_constant__ Rings rings,
                          const __grid_constant__ Maps<true> maps,
                          const __grid_constant__ Call call) {
#if __CUDA_ARCH__ >= 900  // see can_chain
  using Products = typename Kind::template Products<kColumnTiles>;
  constexpr bool kFinishes = std::is_same_v<Call, FewRows>;
  constexpr bool kFinds = kFinishes && kColumnTiles == 1;  // beside more rows there are inverses
  extern __shared__ __align__(16) char shared[];
  __shared__ Barrier barriers[kRingStages + kMostRingWarps / 2], x_here, scales_here, sums_here;
  __shared__ float inverses[kColumnTile];
  const unsigned begin = shared_address(shared);
  const unsigned pipeline = ceil_div(begin, unsigned(kTmaTileAlignment)) * kTmaTileAlignment;
  const unsigned near = pipeline + unsigned(rings.bytes);
  const int rank = int(rank_in_cluster());
  const int warp = __shfl_sync(0xffffffff, int(threadIdx.x) / kWarp, 0);  // the same for all
  const bool multiplies = warp < rings.warps;
  const int lane = int(threadIdx.x) % kWarp;
  const int slot = multiplies ? warp / kBlockParts : geometry.tiles;
  const int part = rank * kBlockParts + warp % kBlockParts;
  const int first_line = rank * kBlockParts * geometry.k_part_lines;
  // Of the last parts there may be fewer.
  const int lines = ::min(geometry.k_part_lines, rings.lines - part * geometry.k_part_lines);
  const WeightRows rows(rings.parts, rings.columns, rings.rows, blockIdx.x / kRingCluster);
  const unsigned ring_at = pipeline + unsigned(warp * rings.stages * kRingStageBytes);
  const unsigned here_at = shared_address(barriers + warp * rings.stages);
  RingCopies copies(geometry, rings, maps.weight, rows, slot, part * geometry.k_part_lines, lines,
                    ring_at, here_at);
  // So that no warp has much to do before its own lines.
  const bool copies_x = warp == rings.warps - 1, copies_scales = warp == rings.warps - 2;

  if (lane == 0 && multiplies) {
#pragma unroll 1
    for (int i = 0; i < rings.stages; ++i) {
      begin_barrier(here_at + unsigned(i) * unsigned(sizeof(Barrier)), 1);
    }
    if (copies_x) begin_barrier(&x_here, 1);
    if (copies_scales) begin_barrier(&scales_here, 1);
    if (warp == 0) begin_barrier(&sums_here, 1);
    show_barriers();
    copies.ask_ahead();
  }
  if (threadIdx.x == 0) {  // of all splits, whoever sends them
    arrive_expecting(&sums_here, kSplitKParts * rings.rows * rings.parts * geometry.columns *
                                     int(sizeof(float)));
  }
  come_to_cluster();
  if (threadIdx.x == 0 && copies.is_done()) let_next_begin();  // the block has no lines
  wait_for_previous();
  if (lane == 0 && multiplies) {
    if (copies_x) copy_x<Kind>(geometry, rings, maps.x, first_line, near, &x_here);
    if (copies_scales) {
      copy_scales<Kind>(geometry, rings, maps, int(rows.first), first_line, near, &scales_here);
    }
#pragma unroll 1
    for (int i = 0; i < rings.stages && !copies.is_done(); ++i) copies.begin();
  }
  __syncthreads();  // all barriers have begun
  if constexpr (kFinds) {
    if (rings.finders > 0 && warp >= rings.first_finder) {
      find_inverses<kTogether>(call, inverses, warp - rings.first_finder, rings.finders);
    }
  }
  wait_for(&x_here, 0);
  wait_for(&scales_here, 0);

  const auto all = reinterpret_cast<char*>(shared) + (near - begin);
  const Sums sums(all + rings.sums_place, rows.share, geometry);
  int stage = 0, phase = 0;
  bool met = false;
#pragma unroll 1
  for (int tile = slot; tile < geometry.tiles; tile += rings.slots) {
    Products products(geometry,
                      LaneScales(geometry, rings.boxes, rings.box_columns, tile * kTileRows));
    const int first = part * geometry.k_part_lines - first_line;
#pragma unroll 1
    for (int line = first; line < first + lines; ++line) {
      wait_for(here_at + unsigned(stage) * unsigned(sizeof(Barrier)), phase);
      products.add(ring_at + unsigned(stage * kRingStageBytes), near, line);
      __syncwarp();
      if (lane == 0 && !copies.is_done()) copies.begin();
      if (++stage == rings.stages) stage = 0, phase ^= 1;
    }
    float totals[Products::kSums];
    products.copy_sums(totals);
    if (!met) wait_for_cluster();  // the barrier of the other block has begun
    met = true;
    Sender(sums, geometry, rows, part, tile * kTileRows)
        .send(totals, [&](float* place, int to, float value) {
      send_in_cluster(place, &sums_here, unsigned(to), value);
    });
  }
  if (!met) wait_for_cluster();
  wait_for(&sums_here, 0);
  if constexpr (kFinishes) {
    if (kFinds && rings.finders > 0) __syncthreads();
    Finisher<typename Kind::T> finisher(call, geometry, rows, sums, rank);
    finisher.finish(call.inverses == nullptr ? inverses : call.inverses);
  } else {
    finish_sums<typename Kind::T>(geometry, rings, sums, rows.first + rank * sums.columns);
  }
#endif
}

// How a cluster has up to so many tiles: by a warp for each, or by all that there may be.
template <class Kind, int kColumnTiles>
Rings divide_among_rings(Geometry& geometry, const typename Kind::Call& call, int most,
                         const Device& device) {
  constexpr int kMostSlots = kMostRingWarps / kBlockParts;
  const int64_t tiles = ceil_div(call.weight_rows(), kTileRows);
  geometry.cluster = kRingCluster, geometry.groups = kBlockParts;  // as Sums has them
  Rings rings = {};
  rings.rows = int(call.rows), rings.parts = call.gated ? 2 : 1;
  rings.lines = int(ceil_div(Kind::weight(call).length, kLineBytes));
  rings.call_columns = call.columns, rings.out = call.out;
  geometry.tiles = tiles_of_cluster(tiles, rings.parts, most, kRingCluster, device.processors);
  rings.slots = std::min(geometry.tiles, kMostSlots);
  rings.warps = rings.slots * kBlockParts;
  rings.stages = std::min((kRingStages + rings.warps / 2) / rings.warps, kMostRingStages);
  rings.bytes = rings.warps * rings.stages * kRingStageBytes;
  if (call.squares.is_present() && call.inverses == nullptr) {
    // Those that multiply have all they can do, but for data that is on its way.
    rings.spare = std::min(kMostRingWarps - rings.warps, int(ceil_div(rings.rows, kTogether)));
    rings.finders = rings.spare > 0 ? rings.spare : rings.warps;
    rings.first_finder = rings.spare > 0 ? rings.warps : 0;
  }
  set_places<Kind, kColumnTiles>(geometry, call, rings.threads());
  rings.columns = geometry.columns * kRingCluster;
  rings.boxes = rings.parts > 1 || rings.columns > kMostBox ? 2 : 1;
  rings.box_columns = rings.columns * rings.parts / rings.boxes;
  rings.box_step = rings.parts > 1 ? int(call.columns) : rings.box_columns;
  rings.skipped = int(call.columns) - rings.columns;
  geometry.scale_tiles = rings.boxes * (Kind::kOffsets ? 2 : 1);
  return rings;
}

// Returns how many bytes a block needs.
template <class Kind>
int64_t set_near(Geometry& geometry, Rings& rings) {
  const int lines = kBlockParts * geometry.k_part_lines;
  const auto aligned = [](int64_t bytes) { return ceil_div(bytes, kLineBytes) * kLineBytes; };
  const int64_t scales = int64_t(lines) * Kind::kGroups * rings.box_columns * sizeof(float);
  const int64_t x = int64_t(lines) * Kind::kXLines * geometry.x_rows * kLineBytes;
  const int64_t before_sums = x + geometry.scale_tiles * aligned(scales);
  geometry.x_place = 0, geometry.scale_place = int(x), geometry.scale_step = int(aligned(scales));
  rings.x_bytes = int(x), rings.box_bytes = int(scales), rings.sums_place = int(before_sums);
  const int64_t sums = kSplitKParts * rings.rows * geometry.sums_pitch * int64_t(sizeof(float));
  return rings.bytes + before_sums + sums + kTmaTileAlignment;
}

inline bool sums_are_results(const FewRows& call) {
  return !call.squares.is_present() && !call.activated && !call.bias.is_present() &&
         !call.residual.is_present() && !call.scaled.is_present();
}

// Does nothing and returns false if it cannot, as where half of x is too large to stay near, or if
// there are too few rows of the weight for all processors.
template <class Kind, int kColumnTiles>
bool launch_in_rings(const typename Kind::Call& call, const Device& device, cudaStream_t stream,
                     const char* op) {
  static_assert(kColumnTiles * kColumnTile <= kMostRingRows);
  const bool finishes = !sums_are_results(call);
  const auto plain = &few_rows_rings_kernel<Kind, kColumnTiles, Nothing>;
  const auto kernel = &few_rows_rings_kernel<Kind, kColumnTiles, FewRows>;
  const Scales& scales = Kind::scales(call);
  if (scales.group_lines != 1 || scales.part_units * Kind::kGroups != kUnitsOfLine) return false;
  if (ceil_div(call.weight_rows(), kTileRows) * kRingCluster < device.processors) return false;
  // Places that are worked out below fit 32 bits.
  if (Kind::weight(call).length > int64_t(kMostBox) * kLineBytes) return false;
  if (kColumnTiles > 1 && call.squares.is_present() && call.inverses == nullptr) return false;
  if (!(finishes ? can_chain(kernel, op) : can_chain(plain, op))) return false;
  constexpr int kBeside = 1024;  // bytes, for barriers and inverses
  for (int most = kMostRingTiles; most >= kMostRingTiles / 4; most /= 2) {
    Geometry geometry = {};
    Rings rings = divide_among_rings<Kind, kColumnTiles>(geometry, call, most, device);
    // Where results take long to make, kernels of two blocks beside each other do it meanwhile.
    if (finishes && kColumnTiles > 1 && geometry.tiles > rings.slots) continue;
    const int64_t bytes = set_near<Kind>(geometry, rings);
    if (bytes > device.shared_of_block - kBeside) continue;
    const int lines = kBlockParts * geometry.k_part_lines;
    const Boxes boxes = {
        kTileRows,        1, geometry.x_rows, lines * Kind::kXLines, lines * Kind::kGroups,
        rings.box_columns};
    if (boxes.x_lines > kMostBox || boxes.scale_rows > kMostBox) return false;
    const int64_t blocks = blocks_of(call.columns, rings.columns, kRingCluster);
    // Where the next block can only begin when one has ended, memory would have nothing to do.
    const bool few_registers = kRingBlocks<Kind, kColumnTiles> > 1 || rings.threads() <= 8 * kWarp;
    const int64_t both = 2 * (bytes + kBeside + device.shared_reserved);
    if (blocks > device.processors && !(few_registers && both <= device.shared_of_processor)) {
      continue;
    }
    Maps<true> maps = {};
    if (!make_maps<Kind>(maps, call, boxes)) return false;
    const Launch how{unsigned(blocks), rings.threads(), bytes, kRingCluster, true};
    launch_inverses(call, stream, op);
    if (finishes) {
      const FewRows& rest = call;
      launch_kernel(kernel, how, stream, op, geometry, rings, maps, rest);
    } else {
      launch_kernel(plain, how, stream, op, geometry, rings, maps, Nothing{});
    }
    return true;
  }
  return false;
}

}  // namespace dsx::cuda
