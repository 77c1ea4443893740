// Skinny GEMMs on CUDA: where a block has what of the weight and of x, and how that comes near.
//
// The length is cut into split-K parts, which are lines of 128 bytes of each row of the weight,
// beside each of which there are one or more lines of x. Step by step a block has the next lines of
// some parts near, of rows of the weight and of all rows of x, in a stage of its pipeline, while
// those of the steps after it are on their way to the other stages.
//
// A multiplication is a Kind, a struct with
//   Call                    a struct derived from FewRows
//   T                       the storage type of x and of the results
//   Weight, X               the types that rows of the weight and of x are made of here
//   kXLines                 lines of x beside one of the weight
//   kScaled                 whether groups of elements of the weight have scales
//   kGrouped                only if kScaled: whether there are several weights, one after another
//   kMostWarps<tiles>       that multiply in a block
//   kTogether               so many of these multiply together, for all columns of kColumnTiles
//   weight(call), x(call)   both as Operands
//   scales(call)            only if kScaled: as Scales
//   Products<column tiles>  what a warp has to do. kInOrder: split-K parts one after the other, not
//                           in pairs. kFillsRegisters: sums of parts are better off in memory while
//                           they wait for others
// and for rings (few_rows_rings_cuda.cuh), whose Products are CodesOf128,
//   kOffsets                whether groups have offsets, too
//   kGroups                 of a line of the weight
#pragma once

#include "common/cuda/tma_tiles.cuh"
#include "common/cuda/chain.cuh"
#include "common/cuda/fetch.cuh"
#include "common/cuda/rows.cuh"
#include "linear/few_rows.h"

namespace dsx::cuda {

constexpr int kSplitKParts = 4, kLevels = 2;  // of the length; 2^kLevels of them
constexpr int kTileRows = 16;                 // of the weight, that a warp multiplies with
constexpr int kColumnTile = 8;                // rows of x, which are columns to the tensor cores
constexpr int kMostStages = 12;
static_assert(kSplitKParts == 1 << kLevels);

// Rows of a matrix as bytes.
template <class T>
struct Operand {
  Rows rows;  // of which only the places count
  int64_t count, length;

  __device__ const T* row(int64_t i) const { return rows.row<T>(i).address; }
  Matrix matrix() const {
    const int64_t pitch = count > 1 ? rows.pitch : length;
    return {rows.data, count, length, pitch * int64_t(sizeof(T)), int(sizeof(T))};
  }
  bool is_aligned() const {
    const uint64_t bits = uint64_t(reinterpret_cast<uintptr_t>(rows.data)) |
                          uint64_t(rows.pitch | rows.group_pitch) * sizeof(T);
    return bits % 16 == 0;
  }
};

// Scales, and maybe offsets behind them: [groups][pitch] floats, one for each row of the weight.
struct Scales {
  const float* scales;
  const float* offsets;  // or null
  int64_t groups, pitch;
  int line_parts;   // groups of a line, if there is more than one
  int part_units;   // 16 bytes each, of such a part or of a line
  int group_lines;  // lines of a group, else

  // Of a line, or of its first part.
  DSX_HOST_DEVICE int group_of(int line) const {
    return line_parts > 1 ? line * line_parts : line / group_lines;
  }
};

// Which blocks and warps have which tiles and split-K parts. No sum depends on it.
struct Geometry {
  int cluster;       // blocks that have the same rows of the weight, and as many split-K parts each
  int groups;        // of warps of a block, which have as many of its split-K parts each
  int tiles;         // of rows of the weight: warps of a group
  int copying;       // warps that do not multiply, of which one copies
  int lines;         // of a split-K part in a step
  int k_part_lines;  // of a split-K part; of the last ones there may be fewer in the rows
  int x_rows;        // near: those of x, and more to a multiple of 8
  int x_lines;       // beside a line of the weight
  int scale_lines;   // of scales, beside a line of the weight
  int scale_tiles;   // of scales in a stage: for each part of the weight, and the same of offsets
  int stages;        // that are near, or on their way
  int columns;       // of the results, that a block finishes
  int finished_rows;      // of x: of as many all threads finish these columns at a time
  uint32_t column_magic;  // 2^32 / columns, rounded up
  int sums_pitch;         // floats, from one row of x to the next in the sums of these columns
  int asked;              // steps of the first split-K part to ask for before the kernel may read
  int of_share;           // blocks that work on one share, of kGrouped
  bool by_engine;         // lines come near as TMA tiles
  bool weight_aligned, x_aligned;  // to 16 bytes, if not by_engine
  // What follows from these, as divisions take long. Bytes are those of a stage.
  int group_k_parts, k_part_steps;
  // A group has its rows of the weight, then those of x, then scales.
  int x_place, scale_place, scale_bytes, scale_step, group_bytes, stage_bytes;

  DSX_HOST_DEVICE int rows() const { return tiles * kTileRows; }
  DSX_HOST_DEVICE int threads() const { return (groups * tiles + copying) * kWarp; }
  // Both without a division, which takes long: the group of a warp, and i / columns.
  __device__ int group_of(int warp) const {
    return (warp >= tiles) + (warp >= 2 * tiles) + (warp >= 3 * tiles);
  }
  __device__ int rank_of(int i) const { return int(__umulhi(uint32_t(i), column_magic)); }

  void set_lines(int count) {
    lines = count;
    group_k_parts = kSplitKParts / (cluster * groups);
    k_part_steps = int(ceil_div(k_part_lines, lines));
    x_place = rows() * lines * kLineBytes;
    scale_place = x_place + x_rows * x_lines * lines * kLineBytes;
    scale_bytes = scale_lines * lines * columns * cluster * int(sizeof(float));
    scale_step = int(ceil_div(scale_bytes, kLineBytes)) * kLineBytes;
    const int scales = scale_tiles * scale_step;
    group_bytes = scale_place + int(ceil_div(scales, kTmaTileAlignment)) * kTmaTileAlignment;
    stage_bytes = group_bytes * groups;
  }
};

template <bool kScaled>
struct Maps {
  CUtensorMap weight, x;
};
template <>
struct Maps<true> : Maps<false> {
  CUtensorMap scales, offsets;
};

// What some clusters work on: rows of x that have one weight, and that weight.
struct Share {
  int number;       // of the weight
  int first, rows;  // of x, and of the results
};

// By one thread of a warp.
template <bool kScaled>
__device__ inline void ask_for_maps(const Geometry& geometry, const Maps<kScaled>& maps) {
  if (!geometry.by_engine || threadIdx.x % kWarp != 0) return;
  ask_for_map(maps.weight);
  ask_for_map(maps.x);
  if constexpr (kScaled) ask_for_map(maps.scales);
}

// Which rows of the weight the blocks of a cluster have: consecutive ones, or in a first part gates
// and in a second one what those gate.
struct WeightRows {
  int parts, columns;  // results of each row of x, which are the rows of a part
  int64_t first;       // of the columns
  int64_t before;      // rows of the weights before this one
  Share share;

  __device__ WeightRows(const FewRows& call, const Geometry& geometry, const Share& of_x,
                        unsigned cluster)
      : parts(call.gated ? 2 : 1),
        columns(geometry.rows() / parts),
        first(int64_t(cluster) * columns),
        before(of_x.number * call.weight_rows()),
        share(of_x) {}

  // The same of so many parts and columns, where there is one weight.
  __device__ WeightRows(int part_count, int column_count, int x_rows, unsigned cluster)
      : parts(part_count),
        columns(column_count),
        first(int64_t(cluster) * columns),
        before(0),
        share{0, 0, x_rows} {}

  // Where a part begins in the weight.
  __device__ int64_t begin(const FewRows& call, int part) const {
    return before + part * call.columns + first;
  }
  // Row number i of the cluster; beyond the end of the part, its last one again.
  __device__ int64_t row(const FewRows& call, int i) const {
    const int part = i >= columns;
    return ::min(begin(call, part) + i - part * columns, before + (part + 1) * call.columns - 1);
  }
  // Which line of its group row i has; those of the same row are `columns` further each.
  __device__ int line(const Geometry& geometry, int i) const {
    const int part = i >= columns;
    return part * geometry.lines * columns + i - part * columns;
  }
};

// Copies by one warp of what a stage has: all of its threads call it.
template <class Kind>
class Copies {
  using Weight = typename Kind::Weight;
  using X = typename Kind::X;

 public:
  __device__ Copies(const typename Kind::Call& call, const Geometry& geometry,
                    const Maps<Kind::kScaled>& maps, const WeightRows& rows, char* pipeline,
                    Barrier* here)
      : call_(call),
        geometry_(geometry),
        maps_(maps),
        rows_(rows),
        pipeline_(pipeline),
        here_(here) {
    if (geometry.by_engine) choose_tile();
  }

  // How many arrive at the barrier of a stage.
  __device__ static int arrivals(const Geometry& geometry) {
    return geometry.by_engine ? 1 : 2 * kWarp;
  }

  // What may be done before anything may be read.
  __device__ void ask_ahead(int rank) const {
    if (!geometry_.by_engine || threadIdx.x % kWarp != 0) return;
    ask_for_maps(geometry_, maps_);
#pragma unroll 1  // instructions are read from memory, too
    for (int step = 0; step < geometry_.asked; ++step) {
#pragma unroll 1
      for (int group = 0; group < geometry_.groups; ++group) {
#pragma unroll 1
        for (int part = 0; part < rows_.parts; ++part) {
          ask_for_tma_tiles(maps_.weight, int(rows_.begin(call_, part)),
                            line(rank, group, 0, step));
        }
      }
    }
  }

  // Begins to copy what a step of the split-K part that all groups are at has, to that stage.
  __device__ void begin(int rank, int k_part, int step, int stage) const {
    Barrier* const barrier = here_ + stage;
    char* near = pipeline_ + stage * geometry_.stage_bytes;
    if (!geometry_.by_engine) {
      const int count = ::min(geometry_.lines, geometry_.k_part_lines - step * geometry_.lines);
      for (int group = 0; group < geometry_.groups; ++group) {
        copy_lines(line(rank, group, k_part, step), count, near + group * geometry_.group_bytes);
      }
      arrive_after_fetches(barrier);
      arrive(barrier);
    } else {
      if (threadIdx.x % kWarp == 0) arrive_expecting(barrier, bytes_of_stage());
      fetch_my_tile(line(rank, tile_.group, k_part, step), near + tile_.place, barrier);
    }
  }

 private:
  // The first one of a step, in the rows.
  __device__ int line(int rank, int group, int k_part, int step) const {
    const int number = (rank * geometry_.groups + group) * geometry_.group_k_parts + k_part;
    return number * geometry_.k_part_lines + step * geometry_.lines;
  }

  __device__ int bytes_of_stage() const {
    return geometry_.groups *
           (geometry_.scale_place + geometry_.scale_tiles * geometry_.scale_bytes);
  }

  // What a lane copies of each stage: so lanes work out at the same time where all of it is.
  struct Tile {
    const CUtensorMap* map = nullptr;  // null: nothing
    int group = 0, place = 0, row = 0;
    bool of_x = false, of_scales = false;
  };

  // A group has its parts of the weight, then x, then scales.
  __device__ void choose_tile() {
    static_assert(kSplitKParts * (2 + 1 + 4) <= kWarp);
    const int lane = threadIdx.x % kWarp, parts = rows_.parts;
    const int each = parts + 1 + geometry_.scale_tiles;
    tile_.group = (lane >= each) + (lane >= 2 * each) + (lane >= 3 * each);
    const int number = lane - tile_.group * each;
    if (tile_.group >= geometry_.groups || number >= each) return;
    tile_.place = tile_.group * geometry_.group_bytes;
    if (number < parts) {
      tile_.map = &maps_.weight;
      tile_.place += number * (geometry_.x_place / 2);
      tile_.row = int(rows_.begin(call_, number));
    } else if (number == parts) {
      tile_.map = &maps_.x;
      tile_.place += geometry_.x_place;
      tile_.row = rows_.share.first;
      tile_.of_x = true;
    } else if constexpr (Kind::kScaled) {
      const int tile = number - parts - 1;
      const bool second = parts > 1 && tile % 2 == 1, offsets = tile >= parts;
      tile_.map = offsets ? &maps_.offsets : &maps_.scales;
      tile_.place += geometry_.scale_place + tile * geometry_.scale_step;
      tile_.row = int(rows_.begin(call_, second));
      tile_.of_scales = true;
    }
  }

  __device__ void fetch_my_tile(int from, char* near, Barrier* barrier) const {
    if (tile_.map == nullptr) return;
    if constexpr (Kind::kScaled) {
      if (tile_.of_scales) {
        const int group = Kind::scales(call_).group_of(from);
        return fetch_tile(near, *tile_.map, tile_.row, group, barrier, policy_);
      }
    }
    if (tile_.of_x) {
      return fetch_tma_tiles(near, *tile_.map, tile_.row, from * Kind::kXLines, barrier);
    }
    fetch_tma_tiles(near, *tile_.map, tile_.row, from, barrier, policy_);
  }

  __device__ void copy_lines(int from, int count, char* near) const {
    const int lane = threadIdx.x % kWarp;
    const auto weight = Kind::weight(call_);
    const auto x = Kind::x(call_);
    const Share& share = rows_.share;
    for (int l = 0; l < count; ++l) {
      for (int i = lane; i < geometry_.rows() * kUnitsOfLine; i += kWarp) {
        const int row = i / kUnitsOfLine, at = rows_.line(geometry_, row) + l * rows_.columns;
        copy_unit(near + place_in_tma_tile(at, i % kUnitsOfLine), weight.row(rows_.row(call_, row)),
                  weight.length, from + l, i % kUnitsOfLine, geometry_.weight_aligned);
      }
    }
    for (int l = 0; l < count * Kind::kXLines; ++l) {
      for (int i = lane; i < share.rows * kUnitsOfLine; i += kWarp) {
        const int row = i / kUnitsOfLine, at = row + l * geometry_.x_rows;
        copy_unit(near + geometry_.x_place + place_in_tma_tile(at, i % kUnitsOfLine),
                  x.row(share.first + row), x.length, from * Kind::kXLines + l, i % kUnitsOfLine,
                  geometry_.x_aligned);
      }
    }
    if constexpr (Kind::kScaled) copy_scales(from, near + geometry_.scale_place);
  }

  // 16 bytes of a row, of that line; with zeros beyond the end.
  template <class T>
  __device__ void copy_unit(char* near, const T* row, int64_t length, int line, int unit,
                            bool aligned) const {
    constexpr int kCount = kUnitBytes / int(sizeof(T));
    const int64_t k = (int64_t(line) * kUnitsOfLine + unit) * kCount;
    const int there = int(::max(int64_t(0), ::min(length - k, int64_t(kCount))));
    if (aligned) return fetch_part(near, there > 0 ? row + k : row, there * int(sizeof(T)));
    alignas(16) T elements[kCount] = {};
    for (int i = 0; i < there; ++i) elements[i] = row[k + i];
    *reinterpret_cast<uint4*>(near) = *reinterpret_cast<const uint4*>(elements);
  }

  // As fetch_tile places them.
  __device__ void copy_scales(int from, char* near) const {
    const Scales& scales = Kind::scales(call_);
    const int lines = geometry_.scale_lines * geometry_.lines, lane = threadIdx.x % kWarp;
    for (int tile = 0; tile < geometry_.scale_tiles; ++tile, near += geometry_.scale_step) {
      const bool second = rows_.parts > 1 && tile % 2 == 1, offsets = tile >= rows_.parts;
      const float* const source = offsets ? scales.offsets : scales.scales;
      const int64_t first = rows_.begin(call_, second);
      for (int i = lane; i < lines * rows_.columns; i += kWarp) {
        const int64_t group = scales.group_of(from) + i / rows_.columns;
        const int64_t row = ::min(first + i % rows_.columns, scales.pitch - 1);
        const bool there = group < scales.groups;
        reinterpret_cast<float*>(near)[i] = there ? source[group * scales.pitch + row] : 0;
      }
    }
  }

  const typename Kind::Call& call_;
  const Geometry& geometry_;
  const Maps<Kind::kScaled>& maps_;
  const WeightRows& rows_;
  char* const pipeline_;
  Barrier* const here_;
  const uint64_t policy_ = read_once();
  Tile tile_;
};

// Sums of 2^n split-K parts in the order of pairs: neighbours, then neighbouring pairs, and so on.
template <int kCount, bool kInMemory>
class Pairwise {
 public:
  // Takes the next values; after number 2^n they have become the sums of all.
  __device__ void add(float (&values)[kCount]) {
    bool goes_on = true;
#pragma unroll(kInMemory ? 1 : kLevels)  // at a number that is not known before there is memory
    for (int level = 0; level < kLevels; ++level) {
      if (!goes_on) continue;
      goes_on = count_ >> level & 1;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (goes_on) {
          values[i] = kept_[level][i] + values[i];
        } else {
          kept_[level][i] = values[i];
        }
      }
    }
    ++count_;
  }

 private:
  int count_ = 0;
  float kept_[kLevels][kCount];
};

}  // namespace dsx::cuda
