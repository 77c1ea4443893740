// Rows for the choices of tokens, which lie expert by expert: a stable sort of small numbers. No
// torch: plain pointers and numbers.
#pragma once

#include "common/math.h"

namespace dsx {

constexpr int64_t kMostExperts = 1024;

struct Assign {
  int64_t tokens, k;       // tokens * k fits into 31 bits
  int64_t num_experts;     // 1 to kMostExperts
  int64_t capacity;        // rows of an expert at the most
  const int64_t* experts;  // [tokens, k]; what is no expert's number is dropped and not counted
  const int64_t* seed;     // one number: of the order of tokens; null: as they are
  int64_t* slots;          // [tokens, k] written: a row, or -1
  int32_t* offsets;        // [num_experts] written: where the rows of each expert end
  int64_t* counts;         // [num_experts] written: choices
  int64_t* first_counts;   // [num_experts] written: first choices
  int32_t* of_tiles;       // for CUDA: workspace of workspace_of_assign numbers
};

// All tokens in an order that follows from a seed: a Feistel network of six rounds over pairs of
// numbers of so many bits that all tokens have one, repeated where it leads beyond them. Luby &
// Rackoff, "How to construct pseudorandom permutations from pseudorandom functions", 1988; Black &
// Rogaway, "Ciphers with arbitrary finite domains", 2002, section 4. The keys are the finalizer of
// SplitMix64 of the seed; a round is that of MurmurHash3.
class TokenOrder {
 public:
  DSX_HOST_DEVICE TokenOrder(int64_t tokens, int64_t seed) : tokens_(uint64_t(tokens)) {
    uint64_t x = uint64_t(seed);
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    x ^= x >> 31;
    keys_[0] = uint32_t(x);
    keys_[1] = uint32_t(x >> 32);
    while (tokens_ > uint64_t(1) << 2 * half_bits_) ++half_bits_;
  }

  // Which token has this place. Each place from 0 on has another one.
  DSX_HOST_DEVICE int64_t token_at(int64_t place) const {
    const uint32_t mask = (1u << half_bits_) - 1;
    uint64_t x = uint64_t(place);
    do {
      uint32_t left = uint32_t(x >> half_bits_), right = uint32_t(x) & mask;
      for (uint32_t round = 0; round < 6; ++round) {
        const uint32_t mixed = mix(right + keys_[round % 2] + round * 0x9e3779b9u) & mask;
        const uint32_t next = left ^ mixed;
        left = right;
        right = next;
      }
      x = uint64_t(left) << half_bits_ | right;
    } while (x >= tokens_);
    return int64_t(x);
  }

 private:
  DSX_HOST_DEVICE static uint32_t mix(uint32_t x) {
    x = (x ^ x >> 16) * 0x85ebca6bu;
    x = (x ^ x >> 13) * 0xc2b2ae35u;
    return x ^ x >> 16;
  }

  uint64_t tokens_;
  uint32_t keys_[2];
  int half_bits_ = 0;
};

// On CUDA the places of tokens are cut into tiles, each choice apart: of so many places, which
// follow from the sizes alone.
constexpr int64_t kLeastPlaces = 1024, kTiles = 2048;
struct AssignTiles {
  int64_t places, of_choice;  // of a tile; tiles of a choice

  AssignTiles(int64_t tokens, int64_t k) : places(kLeastPlaces) {
    if (tokens * k > places * kTiles) places = ceil_div(tokens * k, kTiles);
    of_choice = ceil_div(tokens, places);
  }
};
// Up to so many choices one block has all of them, without a workspace.
constexpr int64_t kMostFewChoices = 1024;
inline bool are_few(const Assign& call) {
  return call.tokens > 0 && call.tokens * call.k <= kMostFewChoices;
}
inline int64_t workspace_of_assign(const Assign& call) {
  if (are_few(call)) return 0;
  return AssignTiles(call.tokens, call.k).of_choice * call.k * call.num_experts;
}

void assign_cpu(const Assign& call);
// Queues the same on the stream (cudaStream_t). Throws std::runtime_error.
void assign_cuda(const Assign& call, void* stream);

}  // namespace dsx
