// What a warp knows of its page of a task: which tokens rows see, and where its lanes read.
//
// Elements of a head and tokens of a page may come in any order, so long as both factors of a
// product have the same one. Of a lane, `row` is lane / 4 and `pair` lane % 4. In both products its
// columns, the rows of queries, are 2 pair and 2 pair + 1; of the scores it has tokens 8 k + row.
#pragma once

#include "attention/decode/decode_pipeline_cuda.cuh"

namespace dsx::cuda {

// Tokens of a page, by their numbers in it unless they are said to be of the sequence.
struct PageTokens {
  int begin;                 // of the page, in the sequence
  int fresh;                 // the new token, if the block itself has made it; -1: it is not here
  bool is_edge;              // there are tokens that some row does not see
  int seen_begin, seen_end;  // by some row; may lie outside of the page

  PageTokens() = default;
  __device__ PageTokens(const Task& task, int first, bool has_fresh)
      : begin(first),
        fresh(has_fresh ? inside(task.length - 1 - begin) : -1),
        is_edge(begin < task.seen_by_last || begin + kPageTokens > task.position(0) + 1),
        seen_begin(task.seen_begin - begin),
        seen_end(task.length - begin) {}

  // Whether no row sees any token of the stage that begins with this one.
  __device__ bool is_unseen(int token) const {
    return token >= seen_end || token + kStageTokens <= seen_begin;
  }

 private:
  __device__ static int inside(int token) { return token >= 0 && token < kPageTokens ? token : -1; }
};

// A lane, and where it reads matrices of a stage. Those who need some of it take all of it by
// reference: the compiler then keeps in registers what it would otherwise spill.
template <class Kind, int kWidth>
class PageLane {
  using Layout = cuda::StageLayout<Kind, kWidth>;

 public:
  const int number = threadIdx.x % 32;

  __device__ PageLane() {
    const int row = number % 8, next_tokens = number / 8 % 2, next_piece = number / 16;
    begin_ = (next_tokens * 8 + row) * Layout::kRow;
    piece_ = swizzled<Layout::kRow>(row, next_piece) * 16 % Layout::kRow;
  }

  // The byte of a stage's tile where it begins to read matrices: 32 bytes of each of 16 tokens. The
  // swizzle is an exclusive or of pieces, so that another load is one, too.
  __device__ int place(int tile, int load) const {
    return begin_ + tile * 16 * Layout::kRow + (piece_ ^ load * 32);
  }
  // The element of a head that it has in a step of 16, as its first or its second one.
  __device__ int element(int step, int second) const {
    const int row = number / 4;
    return step * 16 + (Kind::kQuantized ? row * 2 + second : row + second * 8);
  }

 private:
  // Of its row, and of a piece of that. To keep both apart spills less than to keep their sum.
  int begin_, piece_;
};

}  // namespace dsx::cuda
