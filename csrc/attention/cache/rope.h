// Rotary position embedding: pairs of elements of each head are rotated by an angle that grows with
// the position of the token. No torch: plain pointers and numbers.
#pragma once

#include "common/dispatch.h"
#include "common/pointer.h"
#include "common/simd/isa.h"

namespace dsx {

// The heads of all tokens, of which each lies in one piece.
struct Heads {
  void* data = nullptr;  // null: absent
  int64_t heads = 0;
  int64_t of_batch = 0, of_token = 0, of_head = 0;  // elements from one to the next
  Dtype dtype = Dtype::float32;

  DSX_HOST_DEVICE bool is_present() const { return data != nullptr; }

  // T is the storage type that holds the dtype, or Any.
  template <class T>
  DSX_HOST_DEVICE Pointer<T> at(int64_t batch, int64_t token, int64_t head) const {
    return Pointer<T>::to(data, dtype) + (batch * of_batch + token * of_token + head * of_head);
  }
};

struct Positions {
  const void* data;
  bool is_long;  // int64_t, else int32_t
  int64_t of_batch, of_token;

  DSX_HOST_DEVICE int64_t at(int64_t batch, int64_t token) const {
    const int64_t i = batch * of_batch + token * of_token;
    return is_long ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

struct Frequencies {
  const void* data;  // [pairs] radians from one position to the next
  bool is_double;    // else float

  DSX_HOST_DEVICE double at(int64_t pair) const {
    return is_double ? static_cast<const double*>(data)[pair]
                     : double(static_cast<const float*>(data)[pair]);
  }
};

struct Rope {
  int64_t batches, tokens;
  int64_t width;     // of a head
  int64_t pairs;     // that are rotated, 2 * pairs <= width; what comes behind them stays as it is
  bool interleaved;  // pair j is elements 2 j and 2 j + 1, else j and pairs + j
  bool negative;     // rotates the other way
  bool in_place;     // results are where the sources are
  float scale;       // of what is rotated
  Positions positions;
  Frequencies frequencies;
  Heads q, k;          // k may be absent
  Heads q_out, k_out;  // written; apart from all else, or in place
};

// Tokens [begin, end) of all batches one after the other. Disjoint ranges may run on different
// threads; the bits depend neither on them nor on the ISA. Never throws.
void rope_cpu(Isa isa, const Rope& call, int64_t begin, int64_t end);

// Queues the same, for all tokens, on the stream (cudaStream_t). Throws std::runtime_error.
void rope_cuda(const Rope& call, void* stream);

}  // namespace dsx
