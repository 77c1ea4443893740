// Rows of some tokens, by the ids of these: out of all tokens, back among them, and all tokens with
// some of them replaced or added up. No torch: plain pointers and numbers; of what type elements
// are matters to sums alone.
#pragma once

#include "common/dtype.h"
#include "common/simd/isa.h"

namespace dsx {

// A row for each token of each sample; all are of the same length.
struct TokenRows {
  char* data = nullptr;   // null: absent
  int64_t of_sample = 0;  // bytes from one sample to the next
  int64_t of_token = 0;

  DSX_HOST_DEVICE bool is_present() const { return data != nullptr; }
  DSX_HOST_DEVICE char* row(int64_t sample, int64_t token) const {
    return data + sample * of_sample + token * of_token;
  }
};

// Which tokens are kept of each sample. On CUDA an id that is none of its tokens names nothing.
struct KeptTokens {
  int64_t samples, tokens, kept;
  const int32_t* ids;  // [samples, kept]

  DSX_HOST_DEVICE bool is_token(int32_t id) const {
    return uint64_t(int64_t(id)) < uint64_t(tokens);
  }
};

struct MoveTokens {  // a row for each id
  KeptTokens tokens;
  int64_t bytes;  // of a row
  TokenRows all, part;
  bool to_all;  // else to the part, where the row of an id that names nothing is zeros
};

enum class Number : int8_t { float32, bfloat16, float16, float64 };

struct MergeTokens {  // a row for each token
  KeptTokens tokens;
  int64_t bytes;
  TokenRows all;   // of tokens that no id names; absent: zeros
  TokenRows part;  // of those that one names; absent: zeros
  TokenRows out;   // written
  bool adds;       // what several ids name is the sum of their rows; else the first of these
  Number number;   // of elements, if it adds
  // Given on the CPU alone: the first id that names a token, and the next one that names the same.
  const int32_t* first;  // [samples, tokens] -1: none
  const int32_t* next;   // [samples, kept] -1: none
};

// Ids, or tokens, [begin, end) of all samples. Disjoint ranges may run on different threads. Never
// throw.
void move_tokens_cpu(Isa isa, const MoveTokens& call, int64_t begin, int64_t end);
void merge_tokens_cpu(Isa isa, const MergeTokens& call, int64_t begin, int64_t end);

// Queue all of it on the stream (cudaStream_t). They throw std::runtime_error.
void move_tokens_cuda(const char* op, const MoveTokens& call, void* stream);
void merge_tokens_cuda(const char* op, const MergeTokens& call, void* stream);

}  // namespace dsx
