// Long rows of bfloat16 that pass through the shared memory of clusters of blocks, which stay on
// their multiprocessors: a cluster takes one row after the other, each of its blocks a part of it.
// Parts arrive by the copy engine of compute capability 9.0, become the result where they lie, and
// leave by the engine; a part's slot then gets that of a row a few further on. So memory is read
// and written all the time, whatever the threads that compute are waiting for.
//
// These add up the next row before they take the totals of a row: while the blocks tell each other
// their sums, there is something to do.
//
// Rows may be of two tensors, side by side in a slot: the part of the first becomes the result.
#pragma once

#include <optional>

#include "common/cuda/announced_stores.cuh"
#include "common/cuda/streamed_rows.cuh"

namespace dsx::cuda {

// Warps that do not compute. Those that see to what the engine does, by one thread each; one that
// adds up what the others put down; and one that finds totals. Fewer would not leave the others
// more registers.
constexpr int kMovingWarps = 2, kHelpingWarps = kMovingWarps + 2;
constexpr int kHelpers = kHelpingWarps * kWarp;  // a warp group
constexpr int kMostRingThreads = kPartThreads + kHelpers;

// A slot for the row whose totals are waited for, one for the next row, and one whose part is on
// its way.
constexpr int kLeastSlots = 3, kMostSlots = 8;

struct RingShape {
  int64_t rows, length;
  int part;    // elements of each part but the last
  int blocks;  // of a cluster, two or more: parts of a row
  int slots;
};

// A buffer, of those that take turns, and the phase of its barriers.
struct RingTurn {
  int buffer, phase;
};

// What a block has in shared memory besides the slots.
template <int kTensors>
struct alignas(128) RingMemoryOf {
  static constexpr int kMostSums = 2 * kTensors;
  // Buffers of the first sums of rows; and of those that are taken once more for a row.
  static constexpr int kUsual = 4, kAgain = 2, kBuffers = kUsual + kAgain;
  Barrier arrived[kMostSlots], finished[kMostSlots];
  Barrier told[kBuffers];    // sums of all parts have come
  Barrier summed[kUsual];    // of_warps is there
  Barrier found[kUsual];     // totals are there
  uint4 firsts[kMostSlots];  // the first vectors of the rows, of the first tensor
  float of_warps[kBuffers][kPartThreads / kWarp][kMostSums];
  float sums[kBuffers][kMostParts][kMostSums];  // of all parts
  float totals[kUsual][kMostSums];              // of the row

  __device__ static RingTurn usual(unsigned k) { return {int(k % kUsual), int(k / kUsual % 2)}; }
  __device__ static RingTurn again(unsigned k) {
    return {kUsual + int(k % kAgain), int(k / kAgain % 2)};
  }
};

template <int kTensors_>
class RowRingOf {
 public:
  static constexpr int kTensors = kTensors_;
  using T = BFloat16;
  using Memory = RingMemoryOf<kTensors>;
  const RingShape& shape;
  Memory& memory;
  const int threads;     // that compute
  const int rank;        // of this block: which part of a row it has
  const int64_t column;  // where that begins
  const int count;       // of its elements

  __device__ RowRingOf(const RingShape& of, Memory& has, void* slots)
      : shape(of),
        memory(has),
        threads(kTensors == 1 ? int(blockDim.x) - kHelpers : of.part / kPartOfThread),
        rank(int(rank_in_cluster())),
        column(int64_t(rank) * of.part),
        count(int(::min(int64_t(of.part), of.length - column))),
        slots_(static_cast<T*>(slots)) {}

  // All threads of the block call it first.
  __device__ void begin() const {
    if (threadIdx.x == 0) {
      for (int slot = 0; slot < shape.slots; ++slot) {
        begin_barrier(&memory.arrived[slot], kTensors);
        begin_barrier(&memory.finished[slot], threads / kWarp);
      }
      for (Barrier& each : memory.told) begin_barrier(&each, 1);
      for (Barrier& each : memory.summed) begin_barrier(&each, threads / kWarp);
      for (Barrier& each : memory.found) begin_barrier(&each, 1);
      show_barriers();
    }
    cluster_barrier(shape.blocks);
  }

  // Where one row after the other of a cluster is.
  struct Place {
    int64_t row;
    int slot = 0, phase = 0;
  };
  __device__ Place first() const { return {int64_t(blockIdx.x / unsigned(shape.blocks))}; }
  // How many rows the cluster has: fewer than 2^32, as all of them, whose results have memory.
  __device__ unsigned rows() const {
    return (unsigned(shape.rows) - 1 - unsigned(first().row)) / step() + 1;
  }
  __device__ void advance(Place& place, int by = 1) const {
    place.row += int64_t(by) * step();
    place.slot += by;
    if (place.slot < shape.slots) return;
    place.slot -= shape.slots;
    place.phase ^= 1;
  }
  // The one that it was advanced from.
  __device__ Place before(Place place) const {
    place.row -= step();
    if (place.slot == 0) {
      place.slot = shape.slots;
      place.phase ^= 1;
    }
    --place.slot;
    return place;
  }

  // Threads that compute call these. Until the part is there:
  __device__ void wait(const Place& place) const {
    wait_for(&memory.arrived[place.slot], place.phase);
  }
  // Calls body(v, i) for each vector of this thread: number v, from element i of the part on.
  template <class Body>
  __device__ void for_each_vector(const Body& body) const {
#pragma unroll
    for (int v = 0; v < kVectorsOfPart; ++v) {
      const int i = (v * threads + int(threadIdx.x)) * kRowVector;
      if (i < count) body(v, i);
    }
  }
  __device__ RowVector<T> vector(const Place& place, int i, int tensor = 0) const {
    return {{*reinterpret_cast<const uint4*>(slot(place.slot) + tensor * shape.part + i)}};
  }
  __device__ void set(const Place& place, int i, const RowVector<T>& value) const {
    *reinterpret_cast<uint4*>(slot(place.slot) + i) = value.words[0];
  }
  // That of the row.
  __device__ RowVector<T> first_vector(const Place& place) const {
    return {{memory.firsts[place.slot]}};
  }
  // Behind the slots: what ring_of was asked to leave room for.
  __device__ T* behind_slots() const { return slot(shape.slots); }
  // The part has become the result.
  __device__ void finish(const Place& place) const {
    show_to_engine();
    __syncwarp();
    if (int(threadIdx.x) % kWarp == 0) arrive(&memory.finished[place.slot]);
  }
  __device__ void barrier() const { asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory"); }

  // This warp has put down its sums of row number k of the cluster.
  __device__ void show_sums(unsigned k) const {
    __syncwarp();
    if (int(threadIdx.x) % kWarp == 0) arrive(&memory.summed[Memory::usual(k).buffer]);
  }
  // The totals of that row, [kMostSums].
  __device__ const float* wait_for_totals(unsigned k) const {
    const RingTurn turn = Memory::usual(k);
    wait_for(&memory.found[turn.buffer], turn.phase);
    return memory.totals[turn.buffer];
  }

  // Number lane % kSums of the sums of this block's part becomes known to all blocks of the
  // cluster. A warp calls it, which has read what it added up.
  template <int kSums>
  __device__ void tell(int buffer, float sum) const {
    const int lane = int(threadIdx.x) % kWarp;
    Barrier* const told = &memory.told[buffer];
    __syncwarp();
    if (lane == 0) arrive_expecting(told, shape.blocks * kSums * int(sizeof(float)));
    if (lane >= kSums * shape.blocks) return;
    tell_in_cluster(&memory.sums[buffer][rank][lane % kSums], told, unsigned(lane) / kSums, sum);
  }

  // What this thread's warp does: all of its work is `help`, or it computes, but for those that
  // only make the threads of a block whole warp groups.
  __device__ bool helps() const { return helper() >= 0; }
  __device__ bool computes() const { return int(threadIdx.x) < threads; }

  // part_sum(of_warps): lane L returns sum number L % kSums of a part. total(sums of parts): lane L
  // returns total number L % kSums.
  template <int kSums, class PartSum, class Total>
  __device__ void help(const Rows* const (&from)[kTensors], const Rows& to, const PartSum& part_sum,
                       const Total& total) const {
    const int warp = helper() / kWarp;
    if (warp == kMovingWarps) return tell_all<kSums>(part_sum);
    if (warp > kMovingWarps) return find_totals<kSums>(total);
#pragma unroll
    for (int tensor = 0; tensor < kTensors; ++tensor) {
      if (warp % kTensors == tensor) move(*from[tensor], to, tensor, warp / kTensors);
    }
  }

 private:
  __device__ int helper() const { return int(threadIdx.x) - (int(blockDim.x) - kHelpers); }
  __device__ unsigned step() const { return gridDim.x / unsigned(shape.blocks); }
  __device__ T* slot(int number) const { return slots_ + number * kTensors * shape.part; }

  // The movers of a tensor take turns at the rows. Only the result leaves: what was in a slot of
  // another tensor is free first.
  __device__ void move(const Rows& from, const Rows& to, int tensor, int mover) const {
    constexpr int kMovers = kMovingWarps / kTensors;
    if (int(threadIdx.x) % kWarp > 0) return;
    const uint64_t policy = read_once();
    const int bytes = count * int(sizeof(T));
    const auto near = [&](const Place& place) { return slot(place.slot) + tensor * shape.part; };
    const auto load = [&](const Place& place) {
      if (place.row >= shape.rows) return;
      const T* const row = from.row<T>(place.row).address;
      Barrier* const barrier = &memory.arrived[place.slot];
      uint4* const first = &memory.firsts[place.slot];
      const int of_first = tensor == 0 ? int(sizeof(*first)) : 0;
      arrive_expecting(barrier, bytes + of_first);
      if (of_first > 0) fetch_piece(first, row, of_first, barrier, policy);
      fetch_piece(near(place), row + column, bytes, barrier, policy);
    };
    Place place = first();
    advance(place, mover);
    for (Place next = place; next.phase == 0; advance(next, kMovers)) load(next);
    for (; place.row < shape.rows; advance(place, kMovers)) {
      wait_for(&memory.finished[place.slot], place.phase);
      if (tensor == 0) {
        store_piece(to.row<T>(place.row).address + column, near(place), bytes, policy);
      }
      Place next = place;
      advance(next, shape.slots);
      load(next);
    }
  }

  // Why no buffer is written too early. A warp puts down row k + 4 after it has taken the totals of
  // row k + 2; so what was put down of row k has been told, and each block has told row k + 2. All
  // warps of each block had put that down then, and so had taken the totals of row k: nobody reads
  // the sums or totals of row k any more. For the same reason no barrier goes through two phases
  // before all have seen the first.
  template <int kSums, class PartSum>
  __device__ void tell_all(const PartSum& part_sum) const {
    static_assert(Memory::kUsual == 4);
    unsigned k = 0;
#pragma unroll 1
    for (int64_t row = first().row; row < shape.rows; row += step()) {
      const RingTurn turn = Memory::usual(k++);
      wait_together_for(&memory.summed[turn.buffer], turn.phase);
      tell<kSums>(turn.buffer, part_sum(memory.of_warps[turn.buffer]));
    }
  }
  // So no block ends before others have told it all that they will: of the last row it has taken
  // the totals then, as of any sums that are taken once more.
  template <int kSums, class Total>
  __device__ void find_totals(const Total& total) const {
    const int lane = int(threadIdx.x) % kWarp;
    unsigned k = 0;
#pragma unroll 1
    for (int64_t row = first().row; row < shape.rows; row += step()) {
      const RingTurn turn = Memory::usual(k++);
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

using RingMemory = RingMemoryOf<1>;
using RowRing = RowRingOf<1>;

struct RingLaunch {
  Launch launch;
  RingShape shape;
};

// For so many rows of this length. None where the rows have not as many parts as clusters can have,
// or the device has no room for one, or runs code of the kernel that has no copy engine. How many
// rows there are does not matter to that. `parts_behind`: how many parts of vectors there is to be
// room for behind the slots. Where there are two tensors, those that compute and those that help
// are warp groups, which give and take registers.
template <class Ring = RowRing, class... Parameters>
std::optional<RingLaunch> ring_of(void (*kernel)(Parameters...), int64_t rows, int64_t length,
                                  const char* op, int parts_behind = 0) {
  const int64_t parts = parts_of(length);
  if (parts < 2 || parts > kMostParts || !can_chain(kernel, op)) return {};
  int device = 0, most = 0;
  check(cudaGetDevice(&device), op);
  check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), op);
  const int part = int(part_of(length)), part_bytes = part * int(sizeof(typename Ring::T));
  const int slot_bytes = Ring::kTensors * part_bytes, behind_bytes = parts_behind * part_bytes;
  const int room = most - int(sizeof(typename Ring::Memory)) - behind_bytes;
  const int slots = std::min(kMostSlots, room / slot_bytes);
  if (slots < kLeastSlots) return {};
  const int threads = part / kPartOfThread, unit = Ring::kTensors > 1 ? kHelpers : kWarp;
  RingLaunch made{{0, int(ceil_div(threads, unit)) * unit + kHelpers,
                   int64_t(slots) * slot_bytes + behind_bytes, int(parts), false},
                  {rows, length, part, int(parts), slots}};
  if (!fill_with_clusters(made.launch, rows, kernel, op)) return {};
  return made;
}

}  // namespace dsx::cuda
