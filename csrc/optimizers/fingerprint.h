// 64-bit fingerprints of the bytes of tensors. No torch: plain pointers and numbers.
//
// What a fingerprint is, on every device and however the work is shared:
//   Memory is words of 32 bits, little-endian; zeros follow where the last row is not full. A word
//   x becomes x + word_key(its place in its row) + row_key(its row, of the block), modulo 2^32.
//   A row is four quarters, whose words number i are a column a, b, c, d. A block, kBlockRows rows,
//   has two sums over its columns modulo 2^64: of a b + c d, and of a c + b d (NH, twice).
//   The fingerprint is the sum, modulo 2^64, of what ColumnSums::of_block makes of the sums of each
//   block, and of mixed(bytes): 0 of nothing.
// So it depends on bits and on their places. A changed word changes one sum unless the other word
// beside it is minus its key, and the other sum likewise; of words that change places the ones
// beside them have to be equal. A difference is missed by chance once in 2^64, but can be made on
// purpose, as the keys are known.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/simd/isa.h"

namespace dsx {

constexpr int kQuarterWords = 32;
constexpr int kRowWords = 4 * kQuarterWords;
constexpr int64_t kRowBytes = 4 * kRowWords;
constexpr int kBlockRows = 32;
constexpr int64_t kBlockBytes = kBlockRows * kRowBytes;

struct Bytes {
  const void* data;  // [bytes] at any alignment
  int64_t bytes;
};

// Adds to the fingerprints what the range [begin, end) of the row that the tensors form has
// (optimizers/chunks.h), whose chunks are blocks. Disjoint ranges may run on different threads.
// Never throws.
void add_fingerprints_cpu(Isa isa, const Bytes* tensors,
                          const int64_t* tensor_begin,  // [count + 1] in bytes
                          int64_t count, int64_t begin, int64_t end,
                          uint64_t* fingerprints);  // [count] zeros before the first range

// Queues on the stream, on the current device, the fingerprint of each tensor. Throws if a launch
// fails.
void fingerprints_cuda(const Bytes* tensors,  // [count] host memory
                       int64_t count,
                       uint64_t* fingerprints,  // [count] device memory, written
                       void* stream);

}  // namespace dsx
