// The gradients of long rows of bfloat16 that pass through the shared memory of clusters of blocks,
// as row_ring.cuh has it of one tensor: here x and the gradient of the result come into a slot, and
// the gradient of x leaves from where x was. The threads of a block always have the same columns:
// what all rows of a cluster add to the gradients of vectors stays in their registers.
#pragma once

#include <optional>

#include "common/cuda/announced_stores.cuh"
#include "common/cuda/streamed_rows.cuh"
#include "norm/norm_cuda.cuh"

namespace dsx::cuda {

// Warps that do not compute: two of which a thread sees to what the engine does, one that adds up
// and tells sums, and one that is there
constexpr int kGradHelpers = 4 * kWarp;  // a warp group, as those give away registers
constexpr int kMostGradThreads = kPartThreads + kGradHelpers;
constexpr int kLeastGradSlots = 3, kMostGradSlots = 6, kMostGradPieces = 4;

struct GradRingShape {
  int64_t rows, length;
  int part;     // elements of each part but the last
  int blocks;   // of a cluster, two or more: parts of a row
  int slots;    // each for a part of two tensors
  int threads;  // that compute
};

struct GradTurn {
  int buffer, phase;
};

struct alignas(128) GradRingMemory {
  static constexpr int kMostSums = 4, kUsual = 4, kAgain = 2, kBuffers = kUsual + kAgain;
  Barrier arrived[kMostGradSlots * kMostGradPieces], finished[kMostGradSlots * kMostGradPieces];
  Barrier told[kBuffers];        // sums of all parts have come
  Barrier summed[kUsual];        // of_warps is there
  Barrier found[kUsual];         // totals are there
  uint4 firsts[kMostGradSlots];  // the first vectors of the rows
  float of_warps[kBuffers][kPartThreads / kWarp][kMostSums];
  float sums[kBuffers][kMostParts][kMostSums];  // of all parts
  float totals[kUsual][kMostSums];              // of the row

  __device__ static GradTurn usual(unsigned k) { return {int(k % kUsual), int(k / kUsual % 2)}; }
  __device__ static GradTurn again(unsigned k) {
    return {kUsual + int(k % kAgain), int(k / kAgain % 2)};
  }
};

// kPieces: of what a block has of a row, each of which arrives, is finished and leaves on its own.
// kWhole: all parts are as long. kDirect: the threads store the gradient of x from their registers.
template <int kPieces_, bool kDirect_, bool kWhole = false>
class GradRing {
 public:
  static constexpr int kPieces = kPieces_;
  static constexpr bool kDirect = kDirect_;
  static constexpr int kVectorsOfPiece = kVectorsOfPart / kPieces;
  using T = BFloat16;
  const GradRingShape& shape;
  GradRingMemory& memory;
  const int threads;     // that compute
  const int rank;        // of this block: which part of a row it has
  const int64_t column;  // where that begins
  const int count;       // of its elements

  __device__ GradRing(const GradRingShape& of, GradRingMemory& has, void* slots)
      : shape(of),
        memory(has),
        threads(of.threads),
        rank(int(rank_in_cluster())),
        column(int64_t(rank) * of.part),
        count(int(::min(int64_t(of.part), of.length - column))),
        slots_(static_cast<T*>(slots)) {}

  __device__ void begin() const {
    if (threadIdx.x == 0) {
      for (int k = 0; k < shape.slots * kPieces; ++k) {
        begin_barrier(&memory.arrived[k], 2);  // movers
        begin_barrier(&memory.finished[k], threads / kWarp);
      }
      for (Barrier& each : memory.told) begin_barrier(&each, 1);
      for (Barrier& each : memory.summed) begin_barrier(&each, threads / kWarp);
      for (Barrier& each : memory.found) begin_barrier(&each, 1);
      show_barriers();
    }
    cluster_barrier(shape.blocks);
  }

  struct Place {
    int64_t row;
    int slot = 0, phase = 0;
  };
  __device__ Place first() const { return {int64_t(blockIdx.x / unsigned(shape.blocks))}; }
  __device__ void advance(Place& place, int by = 1) const {
    place.row += int64_t(by) * step();
    place.slot += by;
    if (place.slot < shape.slots) return;
    place.slot -= shape.slots;
    place.phase ^= 1;
  }

  __device__ void wait(const Place& place, int piece) const {
    wait_for(&memory.arrived[place.slot * kPieces + piece], place.phase);
  }
  // Calls body(v, i) for each vector of this thread, and before and after each piece
  // before(piece) and after(piece).
  template <class Before, class Body, class After>
  __device__ void for_each_piece(const Before& before, const Body& body, const After& after) const {
#pragma unroll
    for (int v = 0; v < kVectorsOfPart; ++v) {
      if (v % kVectorsOfPiece == 0) before(v / kVectorsOfPiece);
      const int i = (v * threads + int(threadIdx.x)) * kRowVector;
      if (kWhole || i < count) body(v, i);
      if ((v + 1) % kVectorsOfPiece == 0) after(v / kVectorsOfPiece);
    }
  }
  template <class Body>
  __device__ void for_each_vector(const Body& body) const {
    const auto nothing = [](int) {};
    for_each_piece(nothing, body, nothing);
  }
  __device__ RowVector<T> x(const Place& place, int i) const {
    return {{*reinterpret_cast<const uint4*>(slot(place.slot) + i)}};
  }
  __device__ RowVector<T> grad_out(const Place& place, int i) const {
    return {{*reinterpret_cast<const uint4*>(slot(place.slot) + shape.part + i)}};
  }
  __device__ void set(const Place& place, int i, const RowVector<T>& value) const {
    *reinterpret_cast<uint4*>(slot(place.slot) + i) = value.words[0];
  }
  __device__ RowVector<T> first_vector(const Place& place) const {
    return {{memory.firsts[place.slot]}};
  }
  // Room for a vector of the block's columns.
  __device__ T* behind_slots() const { return slot(shape.slots); }

  __device__ void finish(const Place& place, int piece) const {
    if (!kDirect) show_to_engine();
    __syncwarp();
    if (int(threadIdx.x) % kWarp == 0) arrive(&memory.finished[place.slot * kPieces + piece]);
  }
  __device__ void barrier() const { asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory"); }

  __device__ void show_sums(unsigned k) const {
    __syncwarp();
    if (int(threadIdx.x) % kWarp == 0) arrive(&memory.summed[GradRingMemory::usual(k).buffer]);
  }
  __device__ const float* wait_for_totals(unsigned k) const {
    const GradTurn turn = GradRingMemory::usual(k);
    wait_for(&memory.found[turn.buffer], turn.phase);
    return memory.totals[turn.buffer];
  }

  template <int kSums>
  __device__ void tell(int buffer, float sum) const {
    const int lane = int(threadIdx.x) % kWarp;
    Barrier* const told = &memory.told[buffer];
    if (lane == 0) arrive_expecting(told, shape.blocks * kSums * int(sizeof(float)));
    if (lane >= kSums * shape.blocks) return;
    tell_in_cluster(&memory.sums[buffer][rank][lane % kSums], told, unsigned(lane) / kSums, sum);
  }

  template <int kSums, class PartSum, class Total>
  __device__ void help(const NormBackward& norm, const PartSum& part_sum,
                       const Total& total) const {
    const int warp = (int(threadIdx.x) - (int(blockDim.x) - kGradHelpers)) / kWarp;
    if (warp == 0) return move<true>(norm.grad_out, norm.grad_x);
    if (warp == 1) return move<false>(norm.x, norm.grad_x);
    if (warp == 2) find_totals<kSums>(part_sum, total);
  }
  // What helpers do where nothing is computed.
  __device__ void help_moving(const NormBackward& norm) const {
    const int warp = (int(threadIdx.x) - (int(blockDim.x) - kGradHelpers)) / kWarp;
    if (warp == 0) return move<true>(norm.grad_out, norm.grad_x);
    if (warp == 1) move<false>(norm.x, norm.grad_x);
  }

 private:
  __device__ unsigned step() const { return gridDim.x / unsigned(shape.blocks); }
  __device__ T* slot(int number) const { return slots_ + number * 2 * shape.part; }

  // Each tensor has a mover: of what was in a slot the gradient is free first.
  template <bool kGrad>
  __device__ void move(const Rows& from, const Rows& to) const {
    constexpr bool kStores = !kGrad && !kDirect;
    if (int(threadIdx.x) % kWarp > 0) return;
    const uint64_t policy = read_once();
    const int of_piece = kVectorsOfPiece * threads * kRowVector;
    const auto bytes_of = [&](int piece) {
      return ::max(0, ::min(of_piece, count - piece * of_piece)) * int(sizeof(T));
    };
    const auto near = [&](const Place& place, int piece) {
      return slot(place.slot) + (kGrad ? shape.part : 0) + piece * of_piece;
    };
    const auto load = [&](const Place& place, int piece) {
      const int bytes = bytes_of(piece);
      const bool with_first = !kGrad && piece == 0;
      Barrier* const barrier = &memory.arrived[place.slot * kPieces + piece];
      uint4* const first = &memory.firsts[place.slot];
      const T* const row = from.row<T>(place.row).address;
      arrive_expecting(barrier, bytes + (with_first ? int(sizeof(*first)) : 0));
      if (with_first) fetch_piece(first, row, int(sizeof(*first)), barrier, policy);
      if (bytes == 0) return;
      fetch_piece(near(place, piece), row + column + piece * of_piece, bytes, barrier, policy);
    };
    Place next = first();
#pragma unroll 1
    for (; next.phase == 0 && next.row < shape.rows; advance(next)) {
#pragma unroll 1
      for (int piece = 0; piece < kPieces; ++piece) load(next, piece);
    }
    Place place = first();
#pragma unroll 1
    for (; place.row < shape.rows; advance(place), advance(next)) {
#pragma unroll 1
      for (int piece = 0; piece < kPieces; ++piece) {
        wait_for(&memory.finished[place.slot * kPieces + piece], place.phase);
        const int bytes = bytes_of(piece);
        if (kStores && bytes > 0) {
          store_piece(to.even_row<T>(place.row).address + column + piece * of_piece,
                      near(place, piece), bytes, policy);
        }
        if (next.row < shape.rows) load(next, piece);
      }
    }
  }

  template <int kSums, class PartSum, class Total>
  __device__ void find_totals(const PartSum& part_sum, const Total& total) const {
    static_assert(GradRingMemory::kUsual == 4);
    const int lane = int(threadIdx.x) % kWarp;
    unsigned k = 0;
#pragma unroll 1
    for (int64_t row = first().row; row < shape.rows; row += step()) {
      const GradTurn turn = GradRingMemory::usual(k++);
      wait_together_for(&memory.summed[turn.buffer], turn.phase);
      tell<kSums>(turn.buffer, part_sum(memory.of_warps[turn.buffer]));
      wait_for_told(&memory.told[turn.buffer], turn.phase);
      __syncwarp();
      const float found = total(memory.sums[turn.buffer]);
      if (lane < kSums) memory.totals[turn.buffer][lane] = found;
      __syncwarp();
      if (lane == 0) arrive(&memory.found[turn.buffer]);
    }
  }

  T* const slots_;
};

template <class Ring>
struct GradTeam {
  static constexpr RowLength kLength = RowLength::is_usual;
  static constexpr bool kShort = false;

  const Ring& ring;
  mutable unsigned rows_put = 0, rows_taken = 0, taken_again = 0;
  mutable bool again = false;  // the first sums of the row have been taken

  __device__ explicit GradTeam(const Ring& of) : ring(of) {}
};

// Sums of parts are added in their order.
template <class Ring, int kSums>
class GradReduction {
 public:
  __device__ GradReduction(const GradTeam<Ring>& team, float*) : team_(team) {}

  __device__ void put(const float (&sums)[kSums]) const {
    const float mine = sums_over_lanes<kWarp>(sums);
    const GradTurn turn = team_.again ? GradRingMemory::again(team_.taken_again)
                                      : GradRingMemory::usual(team_.rows_put);
    const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
    if (lane < kSums) memory().of_warps[turn.buffer][warp][lane] = mine;
    if (!team_.again) ring().show_sums(team_.rows_put++);
  }

  __device__ void take(float (&sums)[kSums]) const {
    if (!team_.again) {
      const float* const totals = ring().wait_for_totals(team_.rows_taken++);
#pragma unroll
      for (int s = 0; s < kSums; ++s) sums[s] = totals[s];
      team_.again = true;
      return;
    }
    ring().barrier();
    const GradTurn turn = GradRingMemory::again(team_.taken_again++);
    if (int(threadIdx.x) < kWarp) {
      ring().template tell<kSums>(turn.buffer, part_sum(ring(), memory().of_warps[turn.buffer]));
    }
    wait_for_told(&memory().told[turn.buffer], turn.phase);
#pragma unroll
    for (int s = 0; s < kSums; ++s) sums[s] = total(ring(), memory().sums[turn.buffer], s);
  }
  __device__ static bool any(bool is_so) { return is_so; }

  __device__ static void help(const Ring& ring, const NormBackward& norm) {
    ring.template help<kSums>(norm, [&](const auto& of_warps) {
      return part_sum(ring, of_warps);
    }, [&](const auto& of_parts) { return total(ring, of_parts, int(threadIdx.x) % kSums); });
  }

 private:
  using SumsOfOne = float[GradRingMemory::kMostSums];

  __device__ static float part_sum(const Ring& ring, const SumsOfOne* of_warps) {
    const int lane = int(threadIdx.x) % kWarp;
    float sums[kSums];
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
      sums[s] = lane < ring.threads / kWarp ? of_warps[lane][s] : 0.0f;
    }
    return sums_over_lanes<kWarp>(sums);
  }
  __device__ static float total(const Ring& ring, const SumsOfOne* of_parts, int number) {
    float sum = 0;
    for (int part = 0; part < ring.shape.blocks; ++part) sum += of_parts[part][number];
    return sum;
  }

  __device__ const Ring& ring() const { return team_.ring; }
  __device__ GradRingMemory& memory() const { return team_.ring.memory; }

  const GradTeam<Ring>& team_;
};

template <class Ring, int kSums>
struct ReductionOf<GradTeam<Ring>, kSums> {
  using type = GradReduction<Ring, kSums>;
};

// The weight of a thread's columns: in registers where they have room for it, else in shared memory
// that no other thread looks at.
template <class Ring, bool kInRegisters>
struct GradWeight {
  using Vector = RowVector<BFloat16>;
  Vector held[kInRegisters ? kVectorsOfPart : 1];
  BFloat16* far;

  __device__ void fetch_all(const Ring& ring, const NormBackward& norm) {
    far = ring.behind_slots();
    ring.for_each_vector([&](int v, int i) {
      constexpr uint32_t kOnes = 0x3f803f80;
      Vector found{{{kOnes, kOnes, kOnes, kOnes}}};
      if (norm.weight.is_present()) {
        found = fetch(norm.weight.even_row<BFloat16>(0), ring.column + i, kRowVector, true);
      }
      if constexpr (kInRegisters) {
        held[v] = found;
      } else {
        *reinterpret_cast<uint4*>(far + i) = found.words[0];
      }
    });
  }
  __device__ Vector at(int v, int i) {
    if constexpr (kInRegisters) {
      uint4& w = held[v].words[0];  // the compiler would hold them as floats
      asm volatile("" : "+r"(w.x), "+r"(w.y), "+r"(w.z), "+r"(w.w));
      return held[v];
    } else {
      return {{*reinterpret_cast<const uint4*>(far + i)}};
    }
  }
};

// What a block has of a row, as Moments reads it.
template <class Ring, class Weight>
struct GradRow {
  const Ring& ring;
  typename Ring::Place place;
  Weight& weight;

  template <class Body>
  __device__ void for_each_vector(const Body& body) const {
    ring.for_each_piece([&](int piece) { ring.wait(place, piece); }, [&](int v, int i) {
      const RowVector<BFloat16> vectors[3] = {ring.x(place, i), ring.grad_out(place, i),
                                              weight.at(v, i)};
      body(i, kRowVector, vectors);
    }, [](int) {});
  }
  __device__ float near() const {
    return sum_of_lanes(floats_of(ring.first_vector(place))) / kRowVector;
  }
};

template <int kRegisters, bool kMore>
__device__ inline void change_registers() {
#if __CUDA_ARCH__ >= 900
  if constexpr (kMore) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
  }
#endif
}

enum class GradWork { all, only_moves };

template <class Kind, class Ring, bool kHoldsWeight, GradWork kWork>
__global__ void __launch_bounds__(kMostGradThreads, 1)
    grad_ring_kernel(const __grid_constant__ NormBackward norm, float inverse_n,
                     const __grid_constant__ GradRingShape shape,
                     OfVectors<float*> partials) {  // [clusters, length] written; null: not wanted
  using T = BFloat16;
  extern __shared__ __align__(128) uint4 grad_slots[];
  __shared__ GradRingMemory memory;
  const Ring ring(shape, memory, grad_slots);
  ring.begin();
  let_next_begin();
  __syncwarp();  // as the warps of a group change their registers together
  const bool helps = int(threadIdx.x) >= int(blockDim.x) - kGradHelpers;
  if (helps) {
    if constexpr (kWork == GradWork::all) change_registers<32, false>();
    if constexpr (kWork == GradWork::only_moves) {
      ring.help_moving(norm);
    } else {
      GradReduction<Ring, 2 * (1 + Kind::kCentered)>::help(ring, norm);
    }
    return;
  }
  if constexpr (kWork == GradWork::all) change_registers<112, true>();
  if (int(threadIdx.x) >= ring.threads) return;
  typename Ring::Place place = ring.first(), next = place;
  if constexpr (kWork == GradWork::only_moves) {
#pragma unroll 1
    for (; place.row < norm.rows; ring.advance(place)) {
      for (int piece = 0; piece < Ring::kPieces; ++piece) {
        ring.wait(place, piece);
        ring.finish(place, piece);
      }
    }
    return;
  }
  using Weight = GradWeight<Ring, kHoldsWeight>;
  Weight weight;
  weight.fetch_all(ring, norm);
  const float offset = norm.weight.is_present() ? norm.weight_offset : 0.0f;
  const auto weight_of = [&](const RowVector<T>& vector) {
    RowFloats floats = floats_of(vector);
    if (offset != 0) floats = floats + RowFloats(offset);
    return floats;
  };
  const auto weighted = [&](int, const auto& vectors) {
    return floats_of(vectors[1]) * weight_of(vectors[2]);
  };
  RowFloats of_weight[kVectorsOfPart], of_bias[kVectorsOfPart];
#pragma unroll
  for (int v = 0; v < kVectorsOfPart; ++v) of_weight[v] = of_bias[v] = RowFloats(0.0f);
  const GradTeam<Ring> team(ring);
  Moments<Kind, GradTeam<Ring>, T, true> moments(team, nullptr);
  using Row = GradRow<Ring, Weight>;
  const auto near = [](const Row& row) { return Kind::kCentered ? row.near() : 0.0f; };
#pragma unroll 1
  for (bool is_ahead = false; place.row < norm.rows; is_ahead = true) {
    if (next.row < norm.rows) {
      const Row row{ring, next, weight};
      ring.wait(next, 0);
      moments.put(row, near(row), weighted);
      ring.advance(next);
    }
    if (!is_ahead) continue;
    const Row row{ring, place, weight};
    const RowMoments<Kind> found = moments.find(row, near(row), inverse_n, norm.eps, weighted);
    team.again = false;
    const Pointer<T> grad_x = norm.grad_x.even_row<T>(place.row) + ring.column;
    ring.for_each_piece([](int) {}, [&](int v, int i) {
      const RowFloats grad = floats_of(ring.grad_out(place, i));
      const RowFloats value = found.standardized_of(floats_of(ring.x(place, i)));
      const RowFloats result = found.gradient(value, grad, weight_of(weight.at(v, i)));
      if constexpr (Ring::kDirect) {
        put<Stored::streamed>(grad_x, i, kRowVector, true, result);
      } else {
        ring.set(place, i, packed_for(grad_x, result));
      }
      of_weight[v] = add_grad_of_weight(value, grad, of_weight[v]);
      if constexpr (Kind::kCentered) of_bias[v] = of_bias[v] + grad;
    }, [&](int piece) { ring.finish(place, piece); });
    ring.advance(place);
  }
  const auto put_sums = [&](const RowFloats(&sums)[kVectorsOfPart], float* of_all) {
    if (of_all == nullptr) return;
    float* const target =
        of_all + int64_t(blockIdx.x / unsigned(shape.blocks)) * norm.length + ring.column;
    ring.for_each_vector([&](int v, int i) {
      store<Access::vector>(Pointer<float>{target + i}, sums[v], kRowVector);
    });
  };
  put_sums(of_weight, partials.weight);
  if constexpr (Kind::kCentered) put_sums(of_bias, partials.bias);
}

struct GradRingLaunch {
  Launch launch;
  GradRingShape shape;
};

// As ring_of.
template <class... Parameters>
std::optional<GradRingLaunch> grad_ring_of(void (*kernel)(Parameters...), int64_t rows,
                                           int64_t length, const char* op) {
  const int64_t parts = parts_of(length);
  if (parts < 2 || parts > kMostParts || !can_chain(kernel, op)) return {};
  int device = 0, most = 0;
  check(cudaGetDevice(&device), op);
  check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), op);
  const int part = int(part_of(length)), part_bytes = part * int(sizeof(BFloat16));
  const int room = most - int(sizeof(GradRingMemory)) - part_bytes;
  const int slots = std::min(kMostGradSlots, room / (2 * part_bytes));
  if (slots < kLeastGradSlots) return {};
  const int threads = part / kPartOfThread;
  GradRingLaunch made{{0, int(ceil_div(threads, kGradHelpers) * kGradHelpers) + kGradHelpers,
                       int64_t(slots) * 2 * part_bytes + part_bytes, int(parts), false},
                      {rows, length, part, int(parts), slots, threads}};
  allow_shared_memory(kernel, made.launch, op);
  const int64_t clusters = std::min(rows, clusters_at_once(kernel, made.launch, op));
  if (clusters == 0) return {};
  made.launch.blocks = unsigned(clusters * parts);
  return made;
}

}  // namespace dsx::cuda
