// A list of tensors seen as one long row of elements, so that work is shared out by elements, not
// by tensors: each thread is given a range of the row and visits the pieces of tensors in it.
#pragma once

#include <algorithm>
#include <vector>

#include "common/math.h"

namespace dsx {

constexpr int64_t kElementwiseChunk = 4096;  // of ops that need a chunk only for aligned vectors
constexpr int64_t kReductionChunk = 65536;   // of ops that add up elements

// Where each of a list of things begins, of which number i has size_of(i) parts; then the end.
template <class SizeOf>
std::vector<int64_t> begins_of(size_t count, const SizeOf& size_of) {
  std::vector<int64_t> begins(count + 1);
  for (size_t i = 0; i < count; ++i) begins[i + 1] = begins[i] + size_of(i);
  return begins;
}

// Adds what the chunks of each tensor have, in their order, in each of `columns`.
inline void add_chunks(const double* of_chunks,                  // [first_chunk.back(), columns]
                       const std::vector<int64_t>& first_chunk,  // begins_of the tensors' chunks
                       int64_t columns,
                       double* totals) {  // [tensors, columns] written
  for (size_t i = 0; i + 1 < first_chunk.size(); ++i, totals += columns) {
    std::fill_n(totals, columns, 0.0);
    for (int64_t chunk = first_chunk[i]; chunk < first_chunk[i + 1]; ++chunk) {
      for (int64_t k = 0; k < columns; ++k) totals[k] += of_chunks[chunk * columns + k];
    }
  }
}

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
