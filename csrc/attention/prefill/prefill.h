// Attention of a chunk of new tokens of each slot over all that the cache has of it. No torch:
// plain pointers and numbers.
#pragma once

#include "attention/decode/decode.h"

namespace dsx {

// What a call says is what decode_attention is told; there are more new tokens.
using PrefillAttention = DecodeAttention;

// On the CPU, work is cut into strips of the rows of a head of keys: row t group + g is head g of
// those that share it, of new token t. Keys go by in pages, counted from the start of the sequence:
// the bits of a row depend on its query and on the keys up to it, and on nothing else.
constexpr int kStripRows = 64;

inline int64_t strips_of(const PrefillAttention& call) {
  return (call.rows() + kStripRows - 1) / kStripRows;
}

// Strips [begin, end) of all batches and heads of keys. Disjoint ranges may run on different
// threads; the bits depend neither on them nor on the ISA. Never throws.
void prefill_attention_cpu(Isa isa, const PrefillAttention& call, int64_t begin, int64_t end);

// Queues all of it on the stream (cudaStream_t). Throws std::runtime_error.
void prefill_attention_cuda(const PrefillAttention& call, void* stream);

}  // namespace dsx
