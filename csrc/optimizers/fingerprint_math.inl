// The formula of fingerprint.h, for the CPU and for CUDA.

// A bijection: no two places of a row have the same key. Xor, shift and multiply, twice: lowbias32
// of Wellons, "Prospecting for Hash Functions", 2018.
DSX_HOST_DEVICE constexpr uint32_t word_key(uint32_t place) {
  uint32_t x = place + 1;
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15) * 0x846ca68bu;
  return x ^ x >> 16;
}

DSX_HOST_DEVICE constexpr uint32_t row_key(int row) { return uint32_t(row) * 0x9e3779b9u; }

// A bijection that leaves 0 as it is: the end of SplitMix64. Steele et al., "Fast Splittable
// Pseudorandom Number Generators", 2014.
DSX_HOST_DEVICE constexpr uint64_t mixed(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

// NH of Black et al., "UMAC: Fast and Secure Message Authentication", 1999, with two sums of the
// same words, each beside another one.
struct ColumnSums {
  uint64_t beside = 0, across = 0;

  DSX_HOST_DEVICE void add(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    beside += uint64_t(a) * b + uint64_t(c) * d;
    across += uint64_t(a) * c + uint64_t(b) * d;
  }

  DSX_HOST_DEVICE void add(const ColumnSums& other) {
    beside += other.beside;
    across += other.across;
  }

  // What a block with these sums, number `block` of its tensor, adds to the fingerprint.
  DSX_HOST_DEVICE uint64_t of_block(int64_t block) const {
    return mixed(mixed(beside + uint64_t(block + 1) * 0x9e3779b97f4a7c15u) ^ across);
  }
};
