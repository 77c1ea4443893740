// Attention of tokens to those of the blocks that a layout names, and its gradients. No torch:
// plain pointers and numbers.
#pragma once

#include "common/math.h"
#include "common/pointer.h"
#include "common/simd/isa.h"

namespace dsx {

constexpr int64_t kLargestHead = 256;  // elements

// Work is cut into strips of tokens, of a block or of half of one.
constexpr int kStripTokens = 64;

// [batch, heads, tokens, width], whose elements of a token lie in one piece.
struct HeadTokens {
  void* data = nullptr;
  Dtype dtype = Dtype::float32;
  int64_t of_batch = 0, of_head = 0, of_token = 0;  // elements from one to the next

  DSX_HOST_DEVICE Pointer<Any> at(int64_t batch, int64_t head, int64_t token) const {
    return Pointer<Any>::to(data, dtype) + (batch * of_batch + head * of_head + token * of_token);
  }
};

// One of [batch, heads, tokens, tokens] in name: what it is broadcast along has a stride of 0. It
// says what takes part, as bytes; or it is added to the scores, and -inf in it leaves out.
struct ScoreMask {
  enum class Kind : int8_t { none, takes_part, added };
  Kind kind = Kind::none;
  Dtype dtype = Dtype::float32;  // of one that is added
  const void* data = nullptr;
  int64_t of_batch = 0, of_head = 0, of_row = 0, of_key = 0;  // elements from one to the next
};
constexpr int kMostMasks = 3;

// The blocks that each row of blocks names, or each column: those of number i are blocks[begins[i]]
// to blocks[begins[i + 1] - 1], in rising order.
struct BlockLists {
  const int64_t* begins;
  const int32_t* blocks;
};

struct BlockSparse {
  int64_t batches, heads, kv_heads, tokens, width;
  int block;
  float scale;
  bool causal;
  bool layout_of_heads;  // or one for all
  int masks;             // how many there are
  ScoreMask mask[kMostMasks];
  BlockLists rows, columns;  // [heads or 1, blocks]; without what causality leaves out; the CPU's
  HeadTokens q, k, v;
  HeadTokens out;  // of q's shape; written
  float* lse;  // [batch, heads, tokens] written: log of the sum of the powers of scores; -inf: none

  DSX_HOST_DEVICE int64_t blocks() const { return ceil_div(tokens, block); }
  DSX_HOST_DEVICE int64_t group() const { return heads / kv_heads; }
  int64_t strip() const { return block < kStripTokens ? block : kStripTokens; }
  int64_t strips() const { return ceil_div(tokens, strip()); }
};

struct BlockSparseBackward {
  BlockSparse forward;  // whose results are read
  HeadTokens grad_out;
  const float* grad_lse;  // [batch, heads, tokens]; null: none
  float* deltas;          // [batch, heads, tokens] written by rows, read by columns; the CPU's
  HeadTokens grad_q, grad_k, grad_v;  // written; without data where they are not wanted
};

// Strips number [begin, end) of all batches and heads, of q or of k and v as it says. Disjoint
// ranges may run on different threads; the bits depend neither on them nor on the ISA. What a row
// finds is put together in the order of its keys, and what a key gets in the order of heads and
// rows. Never throw.
void attend_rows_cpu(Isa isa, const BlockSparse& call, int64_t begin, int64_t end);

// Deltas and the gradient of q; then, by columns, those of k and v.
void backward_of_rows_cpu(Isa isa, const BlockSparseBackward& call, int64_t begin, int64_t end);
void backward_of_columns_cpu(Isa isa, const BlockSparseBackward& call, int64_t begin, int64_t end);

// A layout where the device reads it: [heads or 1, blocks, blocks] of integers.
struct LayoutView {
  const void* data;
  int bytes;                           // of an element
  int64_t of_head, of_row, of_column;  // elements from one to the next
};

// The same on CUDA, which makes the lists in memory of the device. The host looks at no tensor.
int64_t attend_workspace_cuda(const BlockSparse& call);  // bytes
int64_t backward_workspace_cuda(const BlockSparseBackward& call);
void attend_cuda(const BlockSparse& call, const LayoutView& layout, void* workspace, void* stream);
void backward_cuda(const BlockSparseBackward& call, const LayoutView& layout, void* workspace,
                   void* stream);

}  // namespace dsx
