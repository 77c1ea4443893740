// Rows that pass through the shared memory of blocks that stay on their multiprocessors: a block,
// or a cluster of blocks that have some parts of a row each, takes one row after the other. Parts
// arrive by the copy engine of compute capability 9.0, become the result where they lie, and leave
// by the engine; a part's memory then gets another one, a few rows further on. So that memory is
// read and written all the time, whatever the threads that compute are waiting for.
#pragma once

#include <cstdlib>
#include <optional>

#include "common/cuda/streamed_rows.cuh"

namespace dsx::cuda {

// Warps that do not compute. Those that see to what the engine does, by one thread each; one that
// adds up what the others put down; and one that finds totals. Fewer would not leave the others
// more registers.
constexpr int kMovingWarps = 2, kHelpingWarps = kMovingWarps + 2;
constexpr int kMostRingThreads = kPartThreads + kHelpingWarps * kWarp;
constexpr int kMostSlots = 8;
constexpr int kMostAhead = 2;

// How rows lie in the ring. A slot has one part of a row of each tensor.
struct RingShape {
  int64_t length;
  int part;    // elements of each part but the last
  int parts;   // of a row
  int slots;   // of the ring
  int blocks;  // of a cluster
  int ahead;   // rows whose sums are begun before those of a row are waited for, up to kMostAhead
  bool copies, keeps;  // TRIAL: nothing is computed; what is stored is not evicted first
};

// TRIAL
__device__ inline uint64_t usual_policy() {
  uint64_t policy = 0;
#if __CUDA_ARCH__ >= 900
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}

// Begins to copy bytes of shared memory, of which threads have shown what they wrote to it.
__device__ inline void store_piece(void* far, const void* near, int bytes, uint64_t policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(far),
      "r"(shared_address(near)), "r"(bytes), "l"(policy)
      : "memory");
#endif
}
// Until all that this thread has begun to store has been read.
__device__ inline void wait_until_read() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}
// So that the engine sees what this thread wrote to shared memory.
__device__ inline void show_to_engine() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// What a block has in shared memory besides the slots.
struct alignas(128) RingMemory {
  static constexpr int kMostSums = 2, kMostPartsOfBlock = 2;
  static constexpr int kUsual = 2 * kMostAhead + 2, kAgain = 2, kBuffers = kUsual + kAgain;
  Barrier arrived[kMostSlots], finished[kMostSlots];
  Barrier told[kBuffers];                       // sums of all parts have come
  Barrier summed[kUsual];                       // of_warps is there
  Barrier found[kUsual];                        // totals are there
  uint4 firsts[kMostSlots];                     // 16 bytes of the beginning of the row
  float sums[kBuffers][kMostParts][kMostSums];  // of all parts
  float totals[kUsual][kMostSums];              // of the row
  float of_warps[kBuffers][kMostPartsOfBlock][kPartThreads / kWarp * kMostSums];
};

// A row of each tensor.
template <class T, int kTensors>
struct RowOfEach {
  Pointer<T> tensors[kTensors];
};

template <class T, int kTensors>
class RowRing {
 public:
  const RingShape shape;
  const int threads;                  // that compute
  const int rank, first_part, parts;  // of this block
  const unsigned step;                // from a row of a cluster to its next one

  __device__ RowRing(const RingShape& of, int parts_of_block, RingMemory& memory, void* slots)
      : shape(of),
        threads(int(blockDim.x) - kHelpingWarps * kWarp),
        rank(of.blocks > 1 ? int(rank_in_cluster()) : 0),
        first_part(rank * parts_of_block),
        parts(::min(parts_of_block, of.parts - first_part)),
        step(gridDim.x / unsigned(of.blocks)),
        memory_(memory),
        slots_(static_cast<T*>(slots)) {}

  // All threads of the block call it first.
  __device__ void begin() const {
    if (threadIdx.x == 0) {
      for (int slot = 0; slot < shape.slots; ++slot) {
        begin_barrier(&memory_.arrived[slot], 1);
        begin_barrier(&memory_.finished[slot], threads / kWarp);
      }
      for (Barrier& each : memory_.told) begin_barrier(&each, shape.blocks > 1 ? 1 : parts);
      for (Barrier& each : memory_.summed) begin_barrier(&each, threads / kWarp);
      for (Barrier& each : memory_.found) begin_barrier(&each, 1);
      show_barriers();
    }
    cluster_barrier(shape.blocks);
  }

  // What this thread's warp does: it moves, or helps otherwise, or else computes.
  __device__ bool helps() const { return int(threadIdx.x) >= threads; }
  __device__ bool moves() const {
    return helps() && int(threadIdx.x) < threads + kMovingWarps * kWarp;
  }

  // Where one part after the other is.
  struct Place {
    int64_t row;
    int part = 0, slot = 0, phase = 0;
  };
  __device__ Place first() const { return {int64_t(blockIdx.x) / shape.blocks}; }
  __device__ void advance(Place& place, int by) const {
    place.slot += by;
    if (place.slot >= shape.slots) {
      place.slot -= shape.slots;
      place.phase ^= 1;
    }
    place.part += by;
    while (place.part >= parts) {
      place.part -= parts;
      place.row += step;
    }
  }

  __device__ int64_t column(int part) const { return int64_t(first_part + part) * shape.part; }
  __device__ int count(int part) const {
    return int(::min(int64_t(shape.part), shape.length - column(part)));
  }
  __device__ T* slot(int number, int tensor) const {
    return slots_ + (number * kTensors + tensor) * shape.part;
  }

  // The threads of moving warps call it. rows_at(row): its RowOfEach;
  // result_at(row): where the first tensor's slot goes to, null where threads store it.
  template <class RowsAt, class ResultAt>
  __device__ void move(int64_t rows, const RowsAt& rows_at, const ResultAt& result_at) const {
    const int mover = (int(threadIdx.x) - threads) / kWarp;
    if (int(threadIdx.x) % kWarp > 0) return;
    const uint64_t policy = read_once(), kept = shape.keeps ? usual_policy() : policy;
    const auto load = [&](const Place& place) {
      if (place.row >= rows) return;
      const auto all = rows_at(place.row);
      const int bytes = count(place.part) * int(sizeof(T));
      Barrier* const barrier = &memory_.arrived[place.slot];
      const bool has_first = place.part == 0;
      arrive_expecting(barrier, kTensors * bytes + (has_first ? 16 : 0));
      if (has_first)
        fetch_piece(&memory_.firsts[place.slot], all.tensors[0].address, 16, barrier, policy);
#pragma unroll
      for (int t = 0; t < kTensors; ++t) {
        fetch_piece(slot(place.slot, t), all.tensors[t].address + column(place.part), bytes,
                    barrier, policy);
      }
    };
    Place next = first();
    advance(next, mover);
    for (; next.phase == 0; advance(next, kMovingWarps)) load(next);
    Place place = first();
    advance(place, mover);
    for (; place.row < rows; advance(place, kMovingWarps)) {
      wait_for(&memory_.finished[place.slot], place.phase);
      const Pointer<T> result = result_at(place.row);
      if (result) {
        store_piece(result.address + column(place.part), slot(place.slot, 0),
                    count(place.part) * int(sizeof(T)), kept);
        wait_until_read();
      }
      Place again = place;
      advance(again, shape.slots);
      load(again);
    }
  }

  __device__ void wait(const Place& place) const {
    wait_for(&memory_.arrived[place.slot], place.phase);
  }
  // Threads that compute call it when they are through with a part.
  __device__ void finish(const Place& place) const {
    show_to_engine();
    __syncwarp();
    if (int(threadIdx.x) % kWarp == 0) arrive(&memory_.finished[place.slot]);
  }

  __device__ RowVector<T> vector(int slot_number, int tensor, int i) const {
    RowVector<T> found;
    const uint4* source = reinterpret_cast<const uint4*>(slot(slot_number, tensor) + i);
#pragma unroll
    for (int k = 0; k < found.kAccesses; ++k) found.words[k] = source[k];
    return found;
  }
  __device__ void set(int slot_number, int i, const RowVector<T>& value) const {
    uint4* target = reinterpret_cast<uint4*>(slot(slot_number, 0) + i);
#pragma unroll
    for (int k = 0; k < value.kAccesses; ++k) target[k] = value.words[k];
  }
  // That of the row whose first part of this block lies there.
  __device__ RowVector<T> first_vector(const Place& place) const {
    static_assert(sizeof(T) == 2);
    return {{memory_.firsts[place.slot]}};
  }

  __device__ void barrier() const { asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory"); }

  __device__ RingMemory& memory() const { return memory_; }

 private:
  RingMemory& memory_;
  T* const slots_;
};

// Buffers [first, first + count) that are used one after the other, again and again.
template <int kFirst, int kCount>
struct RingTurn {
  int buffer = kFirst, phase = 0;

  __device__ void advance() {
    if (++buffer == kFirst + kCount) {
      buffer = kFirst;
      phase ^= 1;
    }
  }
};
using UsualTurn = RingTurn<0, RingMemory::kUsual>;
using AgainTurn = RingTurn<RingMemory::kUsual, RingMemory::kAgain>;

// Number lane % kSums of the sums of a part of this block becomes known to all blocks of the
// cluster. A warp calls it.
template <int kSums, class Ring>
__device__ inline void tell(const Ring& ring, int buffer, int part, float sum) {
  const int lane = int(threadIdx.x) % kWarp;
  RingMemory& memory = ring.memory();
  float* const near = &memory.sums[buffer][ring.first_part + part][lane % kSums];
  if (ring.shape.blocks == 1) {  // which is no cluster: a store that announces itself is illegal
    if (lane < kSums) *near = sum;
    __syncwarp();
    if (lane == 0) arrive(&memory.told[buffer]);
    return;
  }
  if (lane >= kSums * ring.shape.blocks) return;
#if __CUDA_ARCH__ >= 900
  unsigned address = shared_address(near), barrier = shared_address(&memory.told[buffer]);
  const unsigned rank = unsigned(lane) / kSums;
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(barrier) : "r"(rank));
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
          address),
      "r"(__float_as_uint(sum)), "r"(barrier)
      : "memory");
#endif
}
// One thread calls it for each time that all are told.
template <int kSums, class Ring>
__device__ inline void expect_sums(const Ring& ring, int buffer) {
  if (ring.shape.blocks == 1) return;
  arrive_expecting(&ring.memory().told[buffer], ring.shape.parts * kSums * int(sizeof(float)));
}

// What the warps do that neither compute nor move. One adds up what the warps of the block have put
// down of a row, and tells it; the other one finds the totals when all blocks have told theirs.
//
// Why no buffer is written too early, with kUsual >= 2 * ahead + 2. A warp puts down row k + kUsual
// after it has taken the totals of row k + kUsual - ahead - 1; so what was put down of row k has
// been told, and each block has told row k + kUsual - ahead - 1. All warps of each block had put
// that down then, and so had taken the totals of row k + kUsual - 2 * ahead - 2, which is k or a
// later one: nobody reads the sums or totals of row k any more. For the same reason no barrier goes
// through two phases before all have seen the first.
//
// part_sum(of_warps): lane L returns sum number L % kSums of a part. totals(of_parts): lane L
// returns total number L % kSums.
template <int kSums, class Ring, class PartSum, class Totals>
__device__ void tell_all(const Ring& ring, int64_t rows, const PartSum& part_sum,
                         const Totals& totals) {
  RingMemory& memory = ring.memory();
  const int lane = int(threadIdx.x) % kWarp;
  const bool finds = int(threadIdx.x) >= ring.threads + (kMovingWarps + 1) * kWarp;
  UsualTurn turn;
#pragma unroll 1
  for (int64_t row = ring.first().row; row < rows; row += ring.step, turn.advance()) {
    if (finds) {
      wait_together_for(&memory.told[turn.buffer], turn.phase);
      const float total = totals(memory.sums[turn.buffer]);
      if (lane < kSums) memory.totals[turn.buffer][lane] = total;
      __syncwarp();
      if (lane == 0) arrive(&memory.found[turn.buffer]);
    } else {
      wait_together_for(&memory.summed[turn.buffer], turn.phase);
      if (lane == 0) expect_sums<kSums>(ring, turn.buffer);
      for (int part = 0; part < ring.parts; ++part) {
        tell<kSums>(ring, turn.buffer, part, part_sum(memory.of_warps[turn.buffer][part]));
      }
    }
  }
}

// A warp that computes calls it when it has put down all that it has of a row.
template <class Ring>
__device__ inline void show_sums(const Ring& ring, int buffer) {
  __syncwarp();
  if (int(threadIdx.x) % kWarp == 0) arrive(&ring.memory().summed[buffer]);
}
// The totals of a row, [kMostSums].
template <class Ring>
__device__ inline const float* wait_for_totals(const Ring& ring, const UsualTurn& turn) {
  wait_for(&ring.memory().found[turn.buffer], turn.phase);
  return ring.memory().totals[turn.buffer];
}

struct RingLaunch {
  Launch launch;
  RingShape shape;
};

// For so many rows of this length; none if the device runs code of the kernel that has no copy
// engine.
template <class T, int kTensors, class... Parameters>
std::optional<RingLaunch> ring_of(void (*kernel)(Parameters...), int parts_of_block, int ahead,
                                  int64_t rows, int64_t length, const char* op) {
  if (parts_of(length) > kMostParts || !can_chain(kernel, op)) return {};
  RingLaunch made;
  RingShape& shape = made.shape;
  const char* const way = std::getenv("DSX_ROWS_TRIAL");  // TRIAL
  shape.copies = way != nullptr && way[0] == '0';
  shape.keeps = way != nullptr && way[0] != 0 && way[1] == 'h';
  shape.length = length;
  shape.part = int(part_of(length));
  shape.parts = int(parts_of(length));
  shape.blocks = int(ceil_div(shape.parts, parts_of_block));
  const int slot_bytes = kTensors * shape.part * int(sizeof(T));
  int device = 0, most = 0;
  check(cudaGetDevice(&device), op);
  check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), op);
  const int free_bytes = most - int(sizeof(RingMemory));
  shape.slots = std::min(kMostSlots, free_bytes / slot_bytes);
  // A slot more than are waited for, so that something is always on its way.
  shape.ahead = std::min(ahead, (shape.slots - 1) / std::min(shape.parts, parts_of_block) - 1);
  if (shape.ahead < 0) return {};
  made.launch = {0, shape.part / kPartOfThread + kHelpingWarps * kWarp,
                 int64_t(shape.slots) * slot_bytes, shape.blocks, false};
  allow_shared_memory(kernel, made.launch, op);
  const int64_t clusters = std::min(rows, clusters_at_once(kernel, made.launch, op));
  if (clusters == 0) return {};
  made.launch.blocks = unsigned(clusters * shape.blocks);
  return made;
}

}  // namespace dsx::cuda
