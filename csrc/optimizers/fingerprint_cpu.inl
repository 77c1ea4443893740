// What the blocks of a tensor add to its fingerprint; compiled once per ISA. Plain loops, which
// compilers turn into the multiplications of 32-bit lanes that each ISA has.
#include "optimizers/fingerprint_math.inl"

struct WordKeys {
  uint32_t of[kRowWords];

  constexpr WordKeys() : of() {
    for (int place = 0; place < kRowWords; ++place) of[place] = word_key(uint32_t(place));
  }
};
alignas(64) constexpr WordKeys kWordKeys;

inline uint32_t load_word(const char* source) {
  uint32_t word;
  memcpy(&word, source, sizeof(word));
  return word;
}

inline void add_row(const char* row,  // [kRowBytes]
                    uint32_t key, ColumnSums& sums) {
  ColumnSums of_row;
  for (int i = 0; i < kQuarterWords; ++i) {
    uint32_t x[4];
    for (int quarter = 0; quarter < 4; ++quarter) {
      const int place = quarter * kQuarterWords + i;
      x[quarter] = load_word(row + 4 * place) + kWordKeys.of[place] + key;
    }
    of_row.add(x[0], x[1], x[2], x[3]);
  }
  sums.add(of_row);
}

// Asks for what comes later in the memory that a row is read from.
inline void prefetch_row(const char* row) {
  constexpr int64_t kAhead = 8192, kLine = 64;  // as of norms
  for (int64_t i = 0; i < kRowBytes; i += kLine) prefetch(row + i, kAhead);
}

// Of bytes [begin, end) of a tensor; they begin a block.
inline uint64_t bits_of_blocks(const char* data, int64_t begin, int64_t end) {
  uint64_t bits = 0;
  for (int64_t block = begin; block < end; block += kBlockBytes) {
    ColumnSums sums;
    for (int row = 0; row < kBlockRows; ++row) {
      const int64_t position = block + row * kRowBytes;
      if (position >= end) break;
      if (end - position >= kRowBytes) {
        prefetch_row(data + position);
        add_row(data + position, row_key(row), sums);
        continue;
      }
      char padded[kRowBytes] = {};
      memcpy(padded, data + position, size_t(end - position));
      add_row(padded, row_key(row), sums);
    }
    bits += sums.of_block(block / kBlockBytes);
  }
  return bits;
}
