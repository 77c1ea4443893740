// New tokens of some slots on their way into the cache: queries and keys are normalised and
// rotated, keys and values written. No torch: plain pointers and numbers.
#pragma once

#include "common/simd/isa.h"
#include "attention/cache/paged_kv.h"
#include "attention/cache/rope.h"

namespace dsx {

constexpr int64_t kLargestAppendedWidth = 256;

// A weight of the norm for each element of a head.
struct HeadWeight {
  void* data;  // [width] null: no norm
  Dtype dtype;

  DSX_HOST_DEVICE bool is_present() const { return data != nullptr; }
};

struct RopeAppend {
  PagedKv kv;  // written
  NewTokens news;
  Heads q, k, v;
  Heads q_out;  // written; where q is, or apart from all else
  HeadWeight q_weight, k_weight;
  float eps, weight_offset;  // of the norms; what is added to their weights, -0 for none
  Frequencies frequencies;
  int64_t pairs;        // that are rotated, 0: none
  bool interleaved;     // as in Rope
  float scale;          // of what is rotated
  int32_t* violations;  // set to 1 if a token has no place in the cache
};

// A scale below this is stored as 0: what it is for are zeros then.
constexpr float kLeastScale = 0x1p-100f;

// Rows [begin, end) of [batches, tokens]. Disjoint ranges may run on different threads; the bits
// depend neither on them nor on the ISA. Never throws.
void rope_append_cpu(Isa isa, const RopeAppend& call, int64_t begin, int64_t end);

// Queues the same, for all tokens, on the stream (cudaStream_t). Throws std::runtime_error.
void rope_append_cuda(const RopeAppend& call, void* stream);

}  // namespace dsx
