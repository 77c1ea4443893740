// A cache of keys and values in pages, as kernels see it: one layer, the table of each slot, and
// which tokens of a slot are new. No torch: plain pointers and numbers.
#pragma once

#include "common/dispatch.h"
#include "common/pointer.h"

namespace dsx {

constexpr int kPageTokens = 64;

// What is stored of keys and values: floats, or a byte for each element and a scale for each token
// and head. DSX_KV names the kind that a library is compiled for.
struct FloatKv {
  static constexpr bool kQuantized = false;
  static constexpr const char* kDecode = "decode_attention";
  static constexpr const char* kPrefill = "prefill_attention";
  static constexpr const char* kAppend = "rope_append_";
  static constexpr const char* kAppendAndAttend = "append_and_attend_";
};
struct Int8Kv {  // -127 to 127
  static constexpr bool kQuantized = true;
  static constexpr float kLargest = 127;
  static constexpr const char* kDecode = "decode_attention.int8";
  static constexpr const char* kPrefill = "prefill_attention.int8";
  static constexpr const char* kAppend = "rope_append_.int8";
  static constexpr const char* kAppendAndAttend = "append_and_attend_.int8";
  uint8_t code;
};
struct Fp8Kv {  // e4m3: 1 sign bit, 4 exponent bits, 3 fraction bits; 448 at most
  static constexpr bool kQuantized = true;
  static constexpr float kLargest = 448;
  static constexpr const char* kDecode = "decode_attention.fp8";
  static constexpr const char* kPrefill = "prefill_attention.fp8";
  static constexpr const char* kAppend = "rope_append_.fp8";
  static constexpr const char* kAppendAndAttend = "append_and_attend_.fp8";
  uint8_t code;
};

struct PagedKv {
  void *keys, *values;  // [pages, heads, kPageTokens, width]
  Dtype dtype;          // of them, if they are floats
  int64_t pages, heads, width;
  int64_t of_page, of_head, of_token;  // elements from one to the next, of keys and of values
  float *key_scales, *value_scales;    // [pages, heads, kPageTokens] null: keys are floats
  const int32_t* table;                // [slots, pages_of_slot]
  const int32_t* lengths;              // [slots] with the new tokens
  int64_t slots, pages_of_slot;

  DSX_HOST_DEVICE int64_t place(int64_t page, int64_t head, int64_t token) const {
    return page * of_page + head * of_head + token * of_token;
  }
  DSX_HOST_DEVICE int64_t scale_place(int64_t page, int64_t head, int64_t token) const {
    return (page * heads + head) * kPageTokens + token;
  }
  // The number of a slot's page; -1 if the table has none that there is.
  DSX_HOST_DEVICE int64_t page_of(int64_t slot, int64_t i) const {
    const int64_t page = table[slot * pages_of_slot + i];
    return page < pages ? page : -1;
  }
};

// The new tokens of a batch: row b has those of one slot, of which the last is the slot's last.
struct NewTokens {
  const int32_t* slots;   // [batches] -1: of no slot. Null: row b is slot b
  const int32_t* counts;  // [batches] how many of the tokens there are. Null: all
  int64_t batches, tokens;
};

// One row of a batch.
struct Sequence {
  int64_t slot, count, length;
  bool wrong;  // it is not possible; count and length are 0

  DSX_HOST_DEVICE int64_t position(int64_t token) const { return length - count + token; }
};

// Read is how a number of the batch is read.
template <class Read>
DSX_HOST_DEVICE inline Sequence sequence_of(const PagedKv& kv, const NewTokens& news, int64_t batch,
                                            const Read& read) {
  const int64_t slot = news.slots ? read(news.slots + batch) : batch;
  if (slot == -1) return {slot, 0, 0, false};
  if (slot < 0 || slot >= kv.slots) return {slot, 0, 0, true};
  const int64_t count = news.counts ? read(news.counts + batch) : news.tokens;
  const int64_t length = read(kv.lengths + slot);
  const bool wrong =
      count < 0 || count > news.tokens || length < count || length > kv.pages_of_slot * kPageTokens;
  if (wrong) return {slot, 0, 0, true};
  return {slot, count, length, false};
}
DSX_HOST_DEVICE inline Sequence sequence_of(const PagedKv& kv, const NewTokens& news,
                                            int64_t batch) {
  return sequence_of(kv, news, batch, [](const int32_t* place) { return int64_t(*place); });
}

}  // namespace dsx
