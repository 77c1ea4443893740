// A list of tensors seen as one long row of elements, so that work is shared out by elements, not
// by tensors: each thread is given a range of the row and visits the pieces of tensors in it.
#pragma once

#include "common/math.h"

namespace dsx {

constexpr int64_t kElementwiseChunk = 4096;  // of ops that need a chunk only for aligned vectors
constexpr int64_t kReductionChunk = 65536;   // of ops that add up elements

// The tensor that holds element `row`, which must lie before the end of the row.
inline int64_t tensor_at(const int64_t* tensor_begin, int64_t count, int64_t row) {
  int64_t tensor = 0;  // binary search for the last one that begins at or before `row`
  int64_t search_end = count;
  while (search_end - tensor > 1) {
    const int64_t middle = tensor + (search_end - tensor) / 2;
    if (tensor_begin[middle] <= row) {
      tensor = middle;
    } else {
      search_end = middle;
    }
  }
  return tensor;
}

// Calls visit(tensor, piece_begin, piece_end) for each piece of the range [begin, end), in order;
// the piece holds elements [piece_begin, piece_end) of that tensor and is never empty. Tensors may
// be. Chunks of kChunk elements are counted from the start of each tensor and belong whole to the
// range that holds their first element: the pieces of ranges that partition the row visit every
// element once, and each starts on a chunk, whatever the sizes of the tensors before it.
template <int64_t kChunk, class Visit>
void for_each_piece(
    const int64_t* tensor_begin,  // [count + 1] row index where each tensor begins, then the end
    int64_t count, int64_t begin, int64_t end, const Visit& visit) {
  static_assert(kChunk > 0);
  // The first chunk boundary at or after `row`. A tensor's end is one as well.
  const auto boundary = [&](int64_t row, int64_t tensor) {
    const int64_t chunks = ceil_div(row - tensor_begin[tensor], kChunk);
    const int64_t aligned = tensor_begin[tensor] + chunks * kChunk;
    return aligned < tensor_begin[tensor + 1] ? aligned : tensor_begin[tensor + 1];
  };
  if (begin >= end) return;
  int64_t tensor = tensor_at(tensor_begin, count, begin);
  begin = boundary(begin, tensor);
  end = boundary(end, tensor_at(tensor_begin, count, end - 1));
  for (; begin < end; ++tensor) {
    const int64_t tensor_end = tensor_begin[tensor + 1];
    const int64_t piece_end = tensor_end < end ? tensor_end : end;
    if (begin == piece_end) continue;
    visit(tensor, begin - tensor_begin[tensor], piece_end - tensor_begin[tensor]);
    begin = piece_end;
  }
}

}  // namespace dsx
