// Attention of a few new tokens of each slot over all that the cache has of it. No torch: plain
// pointers and numbers.
#pragma once

#include "common/simd/isa.h"
#include "attention/cache/paged_kv.h"
#include "attention/cache/rope.h"

namespace dsx {

struct RopeAppend;

// Keys are cut into chunks, counted from the start of the sequence. What a query finds in each is
// worked out alone, and put together in the order of the chunks: the bits of a result depend on its
// query and on the keys up to it, and on nothing else.
constexpr int kChunkTokens = 256;
constexpr int kChunkPages = kChunkTokens / kPageTokens;
constexpr int64_t kLargestWidth = 256;

struct DecodeAttention {
  PagedKv kv;
  NewTokens news;
  Heads q;
  int64_t group;              // heads of q that share one of keys
  float scale, soft_cap;      // 0: no cap
  int64_t window;             // keys that a query sees at most, itself included; 0: all
  const float* alibi_slopes;  // [q.heads] null: none
  const float* sinks;         // [q.heads] null: none
  void* out;                  // [batches, tokens, q.heads, width] written, of q's dtype
  float* lse;                 // [batches, tokens, q.heads] written

  DSX_HOST_DEVICE int64_t rows() const { return news.tokens * group; }  // of a head of keys
};

// Keys [begin, end) that the query at a position sees.
struct Seen {
  int64_t begin, end;
};
DSX_HOST_DEVICE inline Seen seen_at(int64_t position, int64_t window) {
  const bool all = window == 0 || position < window;
  return {all ? 0 : position - window + 1, position + 1};
}

// The chunks [first, end) that the new tokens of a slot look at.
struct Chunks {
  int64_t first, end;
};
DSX_HOST_DEVICE inline Chunks chunks_of(const Sequence& sequence, int64_t window) {
  if (sequence.count == 0) return {0, 0};
  const Seen first = seen_at(sequence.position(0), window);
  return {first.begin / kChunkTokens, (sequence.length + kChunkTokens - 1) / kChunkTokens};
}

// What a row, one head of one query, has found in one chunk: `largest` of its scores, the sum of
// e^(score - largest), and that of the values, each times as much. Numbers in memory from there on:
// the values, `sum`, `largest`.
DSX_HOST_DEVICE constexpr int64_t padded_width(int64_t width) { return (width + 15) / 16 * 16; }
DSX_HOST_DEVICE constexpr int64_t partial_floats(int64_t width) { return padded_width(width) + 16; }

// On the CPU, work is cut into tasks: a chunk of a slot, and a head of keys.
struct DecodeTasks {
  const int64_t* first;  // [batches + 1] task of each row of the batch
  float* partials;       // [tasks, rows, partial_floats] written, then read
};

// Tasks [begin, end), then rows [begin, end) of [batches, tokens, q.heads]. Disjoint ranges may run
// on different threads; the bits depend neither on them nor on the ISA. Never throw.
void decode_chunks_cpu(Isa isa, const DecodeAttention& call, const DecodeTasks& tasks,
                       int64_t begin, int64_t end);
void merge_chunks_cpu(Isa isa, const DecodeAttention& call, const DecodeTasks& tasks, int64_t begin,
                      int64_t end);

// How many bytes of workspace the next one takes.
int64_t decode_workspace_bytes(const DecodeAttention& call);

// Queues the same, all of it, on the stream (cudaStream_t). Throws std::runtime_error.
void decode_attention_cuda(const DecodeAttention& call, void* workspace, void* stream);

// Queues the same, by one kernel without a workspace; before it what `append` says, if it is not
// null, but for what that does to q. False: nothing is queued, as that is not possible, or slower.
bool decode_in_clusters_cuda(const DecodeAttention& call, const RopeAppend* append, void* stream);

}  // namespace dsx
