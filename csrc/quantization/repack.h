// Codes that others have packed into words of 32 bits, in the order of packed_weight.h. No torch:
// plain pointers and numbers.
//
// A word has as many codes as fit, from its lowest bits on:
//   along the rows    word (n, i): elements 8 i .. 8 i + 7 of row n, of 8 bits 4 i .. 4 i + 3
//   across the rows   word (j, k): element k of rows 8 j + 0, 2, 4, 6, 1, 3, 5, 7; 4 bits only
// The words of a row, or of eight of them, are a lane; along it are steps. Each is any number of
// words from the next one, as files have lanes side by side or steps.
#pragma once

#include "common/simd/isa.h"
#include "quantization/packed_weight.h"

namespace dsx {

constexpr int kAcross = 8;  // rows that share a word

struct Repack {
  const uint32_t* words;
  int64_t lane_pitch, step_pitch;  // words
  const int64_t* order;            // [length], which element of words each is; null: the same one
  uint8_t* codes;                  // [rows][row_bytes], written
  int64_t rows, length;
  int64_t row_bytes;  // whole lines
  QuantFormat format;
  bool biased;  // of int8: the code that stands for 0 is 128
  bool across;  // whether words are across the rows

  DSX_HOST_DEVICE int bits() const { return bits_of_code(format); }
  DSX_HOST_DEVICE int64_t lanes() const { return across ? rows / kAcross : rows; }
  DSX_HOST_DEVICE int64_t steps() const { return across ? length : ceil_div(length, 32 / bits()); }
  DSX_HOST_DEVICE int64_t padded_length() const { return row_bytes * 8 / bits(); }
};

// Which code of a word across rows each of these has.
DSX_HOST_DEVICE constexpr int nibble_of_row(int row) { return row % 2 * 4 + row / 2; }

// The CPU works on so many lanes at a time.
constexpr int kRepackLanes = 16;

// How many elements of these it then works on at a time, and what each thread needs for it.
int64_t repack_elements_at_once(const Repack& call);
int64_t repack_scratch_bytes(const Repack& call);

// Blocks [begin, end) of kRepackLanes lanes. Never throws.
void repack_cpu(Isa isa, const Repack& call, uint8_t* scratch, int64_t begin, int64_t end);

// Queues all of it on the stream (cudaStream_t). Throws std::runtime_error. An element beyond the
// length, of which an order of CUDA may tell, is 0.
void repack_cuda(const Repack& call, void* stream);

}  // namespace dsx
