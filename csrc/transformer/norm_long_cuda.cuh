// Long rows that are held: a block of 1,024 threads has a row in registers and shared memory, a
// multiprocessor one block. As soon as a vector has been used, that of the next row is asked for in
// its place, so that memory is read while results are written.
#pragma once

#include "common/cuda/fetch.cuh"
#include "transformer/norm_cuda.cuh"

namespace dsx::cuda {

// A thread's part of a long row. Of its vectors the first few are in registers.
template <class T>
struct LongRow {
  using Team = RowTeam<RowLength::is_long>;
  static constexpr int kInRegisters = 4 / int(sizeof(T));
  static constexpr int kMostVectors = 32 / int(sizeof(T));
  static constexpr int kStride = kLongTeam * kRowVector;  // elements from a vector to the next
  static constexpr int kSlotBytes = kStride * int(sizeof(T));

  const Team& team;
  int length;
  RowVector<T>* slots;  // those of this thread, kLongTeam apart
  RowVector<T> registers[kInRegisters];

  // Bytes of shared memory for rows of this length.
  static int64_t shared_bytes(int64_t length) {
    const int64_t slots = ceil_div(length, int64_t(kStride)) - kInRegisters;
    return std::max<int64_t>(0, slots) * kSlotBytes;
  }

  // Asks for vector number v of a row, for all of them in their order.
  __device__ void ask(int v, Pointer<T> row) {
    const int i = (v * kLongTeam + team.thread) * kRowVector;
    if (v < kInRegisters) {
      if (i < length) registers[v < kInRegisters ? v : 0] = fetch(row, i, kRowVector, true);
      return;
    }
    if (i < length) fetch_bytes<int(sizeof(RowVector<T>))>(slot(v), row.address + i);
    end_fetches();
  }

  // Calls body(v, i, vector) for kCount vectors, from number `first` on.
  template <int kCount, class Body>
  __device__ void for_some(int first, const Body& body) const {
#pragma unroll
    for (int v = first; v < first + kCount; ++v) {
      const int i = (v * kLongTeam + team.thread) * kRowVector;
      if (i < length) body(v, i, v < kInRegisters ? registers[v < kInRegisters ? v : 0] : *slot(v));
    }
  }
  // The same, as Moments reads a row: each as soon as it is there.
  template <class Body>
  __device__ void for_each_vector(const Body& body) const {
    for_all(body, std::make_integer_sequence<int, kMostVectors>());
  }

  // Calls make(i) a few vectors at once, begun by begin(i), for what is to be held.
  template <class Begin, class Make>
  __device__ void set_all(const Begin& begin, const Make& make) {
    constexpr int kBatch = 2;
#pragma unroll
    for (int first = 0; first < kMostVectors; first += kBatch) {
      decltype(begin(0)) begun[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int i = ((first + k) * kLongTeam + team.thread) * kRowVector;
        if (i < length) begun[k] = begin(i);
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int v = first + k, i = (v * kLongTeam + team.thread) * kRowVector;
        if (i >= length) continue;
        const RowVector<T> made = make(i, begun[k]);
        if (v < kInRegisters) {
          registers[v < kInRegisters ? v : 0] = made;
        } else {
          *slot(v) = made;
        }
      }
    }
  }

 private:
  template <class Body, int... kNumbers>
  __device__ void for_all(const Body& body, std::integer_sequence<int, kNumbers...>) const {
    const auto one = [&](auto number) {
      constexpr int kNumber = decltype(number)::value;
      if constexpr (kNumber >= kInRegisters) wait_for_fetches<kMostVectors - 1 - kNumber>();
      for_some<1>(kNumber, [&](int, int i, const RowVector<T>& vector) {
        const RowVector<T> vectors[1] = {vector};
        body(i, kRowVector, vectors);
      });
    };
    (one(std::integral_constant<int, kNumbers>()), ...);
  }

  __device__ RowVector<T>* slot(int v) const { return slots + (v - kInRegisters) * kLongTeam; }
};

}  // namespace dsx::cuda
