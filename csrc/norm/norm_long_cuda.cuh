// Long rows that are held: a block of 1,024 threads has a row in registers and shared memory, a
// multiprocessor one block. As soon as a vector has been used, that of the next row is asked for in
// its place, so that memory is read while results are written.
#pragma once

#include "common/cuda/fetch.cuh"
#include "norm/norm_cuda.cuh"

namespace dsx::cuda {

// A thread's part of a long row. Of its vectors the first few are in registers.
template <class T>
struct LongRow {
  using Team = RowTeam<RowLength::is_long>;
  static constexpr int kInRegisters = 4 / int(sizeof(T));
  static constexpr int kMostVectors = 32 / int(sizeof(T));
  static constexpr int kStride = kLongTeam * kRowVector;  // elements from a vector to the next
  static constexpr int kSharedVectorBytes = kStride * int(sizeof(T));

  const Team& team;
  int length;
  RowVector<T>* shared_vectors;  // those of this thread, kLongTeam apart
  RowVector<T> registers[kInRegisters];

  // Bytes of shared memory for rows of this length.
  static int64_t shared_bytes(int64_t length) {
    const int64_t shared_vectors = ceil_div(length, int64_t(kStride)) - kInRegisters;
    return std::max<int64_t>(0, shared_vectors) * kSharedVectorBytes;
  }

  // Asks for vector number v of a row; all that was asked for is there after `wait`.
  __device__ void ask(int v, Pointer<T> row) {
    const int i = column(v);
    if (i >= length) return;
    if (v < kInRegisters) {
#pragma unroll
      for (int r = 0; r < kInRegisters; ++r) {
        if (r == v) registers[r] = fetch(row, i, kRowVector, true);
      }
    } else {
      fetch_bytes<int(sizeof(RowVector<T>))>(shared_vector(v), row.address + i);
    }
  }
  __device__ void ask_for_all(Pointer<T> row) {
    for_each_number<kInRegisters>([&](int first) {
#pragma unroll
      for (int v = first; v < first + kInRegisters; ++v) ask(v, row);
    });
  }
  __device__ void wait() const {
    end_fetches();
    wait_for_fetches<0>();
  }

  __device__ RowVector<T> get(int v) const {
    RowVector<T> vector;
    if (v >= kInRegisters) return *shared_vector(v);
#pragma unroll
    for (int r = 0; r < kInRegisters; ++r) {
      if (r == v) vector = registers[r];
    }
    return vector;
  }
  __device__ void set(int v, const RowVector<T>& vector) {
    if (v >= kInRegisters) *shared_vector(v) = vector;
#pragma unroll
    for (int r = 0; r < kInRegisters; ++r) {
      if (r == v) registers[r] = vector;
    }
  }

  // The element where vector number v begins; perhaps beyond the row.
  __device__ int column(int v) const { return (v * kLongTeam + team.thread) * kRowVector; }

  // Calls body(first) for each kCount numbers of vectors. What is in registers comes first, and is
  // known to the compiler; the others share their code.
  template <int kCount, class Body>
  __device__ void for_each_number(const Body& body) const {
    static_assert(kInRegisters % kCount == 0);
#pragma unroll
    for (int first = 0; first < kInRegisters; first += kCount) body(first);
#pragma unroll 1
    for (int first = kInRegisters; column(first) < length; first += kCount) body(first);
  }

  // As Moments reads a row.
  template <class Body>
  __device__ void for_each_vector(const Body& body) const {
    for_each_number<kInRegisters>([&](int first) {
#pragma unroll
      for (int v = first; v < first + kInRegisters; ++v) {
        if (column(v) >= length) continue;
        const RowVector<T> vectors[1] = {get(v)};
        body(column(v), kRowVector, vectors);
      }
    });
  }

 private:
  __device__ RowVector<T>* shared_vector(int v) const {
    return shared_vectors + (v - kInRegisters) * kLongTeam;
  }
};

}  // namespace dsx::cuda
