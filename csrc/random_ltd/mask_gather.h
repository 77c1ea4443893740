// The parts of masks that belong to some tokens. No torch: plain pointers and numbers.
#pragma once

#include "common/dtype.h"

namespace dsx {

struct MaskGather {
  int64_t layers, samples, heads, queries, tokens, kept;
  int64_t bytes;       // of an element: 1, 2, 4, 8 or 16
  const int32_t* ids;  // [layers, samples, kept]
  // The mask, (samples, heads, tokens, tokens), or with one query for all, and what is from one of
  // each to the next, in bytes.
  const char* mask;
  int64_t of_sample, of_head, of_query, of_token;
  char* out;  // [layers, samples, heads, queries, kept]; queries is kept, or 1

  DSX_HOST_DEVICE int64_t rows() const { return layers * samples * heads * queries; }

  DSX_HOST_DEVICE bool is_token(int32_t id) const {
    return uint64_t(int64_t(id)) < uint64_t(tokens);
  }
};

// What is the same for all elements of a row of the result.
struct MaskRow {
  const int32_t* ids;
  const char* mask;  // null on CUDA if the id of the query is no token

  DSX_HOST_DEVICE MaskRow(const MaskGather& call, int64_t row) {
    const int64_t query = row % call.queries, head = row / call.queries % call.heads;
    const int64_t layer_and_sample = row / call.queries / call.heads;
    ids = call.ids + layer_and_sample * call.kept;
    mask = call.mask + layer_and_sample % call.samples * call.of_sample + head * call.of_head;
    if (call.of_query == 0) return;
    mask = call.is_token(ids[query]) ? mask + ids[query] * call.of_query : nullptr;
  }
};

// Rows [begin, end) of the result. Disjoint ranges may run on different threads. Never throws.
void mask_gather_cpu(const MaskGather& call, int64_t begin, int64_t end);

// Queues all of it on the stream (cudaStream_t). What belongs to ids that are no tokens is 0.
// Throws std::runtime_error.
void mask_gather_cuda(const MaskGather& call, void* stream);

}  // namespace dsx
