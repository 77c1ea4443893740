// The loops of skinny_linear over a range of columns: a few rows of the weight at a time go through
// registers, each beside a few rows of x, which are in the cache as floats.
#include "common/activation_math.inl"
#include "linear/few_rows_cpu.inl"

constexpr int kLanes = 16;        // running sums of a result, whatever the width of Vec
constexpr int64_t kChunk = 4096;  // elements of the length after which they begin anew
constexpr int kParts = kLanes / Vec::size;
constexpr int kMostAtOnce = Vec::size == kLanes && Vec::registers == 1 ? 8 : 4;  // rows of x

// Some rows of a chunk of x as floats, with zeros behind it. The distance of rows is no multiple of
// 4096 bytes, or the same places of all would share a few lines of the cache.
struct Chunk {
  static constexpr int64_t kPitch = kChunk + 48;
  alignas(64) float floats[kMostAtOnce * kPitch];
};

// The last elements of rows of the weight, with zeros behind them.
template <class T>
struct Tails {
  T elements[8][kLanes];
};

// Adds, to the sums of kColumns_ rows of the weight beside kRows rows of x, the next kLanes
// products.
template <int kColumns_, int kRows, class T>
inline void add_products(const T* const (&weight)[kColumns_], const float* x,
                         Vec (&sums)[kColumns_][kRows][kParts]) {
  for (int p = 0; p < kParts; ++p) {
    Vec elements[kColumns_];
    for (int c = 0; c < kColumns_; ++c)
      elements[c] = Vec::load(weight[c] + p * Vec::size, Vec::size);
    for (int r = 0; r < kRows; ++r) {
      const Vec factor = Vec::load(x + r * Chunk::kPitch + p * Vec::size, Vec::size);
      for (int c = 0; c < kColumns_; ++c) {
        sums[c][r][p] = multiply_add(elements[c], factor, sums[c][r][p]);
      }
    }
  }
}

// In a fixed tree.
inline float sum_of_lanes(const Vec (&sums)[kParts]) {
  float lanes[kLanes];
  for (int p = 0; p < kParts; ++p) sums[p].store(lanes + p * Vec::size, Vec::size);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

// `count` products of each of kColumns_ rows of the weight, pitch elements apart, with each of
// kRows rows of x, added to totals[row * kColumns + column].
template <int kColumns_, int kRows, class T>
inline void multiply(const T* weight, int64_t pitch, const float* x, int64_t count, float* totals) {
  Vec sums[kColumns_][kRows][kParts];
  const T* rows[kColumns_];
  for (int c = 0; c < kColumns_; ++c) {
    rows[c] = weight + c * pitch;
    for (int r = 0; r < kRows; ++r) {
      for (int p = 0; p < kParts; ++p) sums[c][r][p] = Vec(0.0f);
    }
  }
  const int64_t whole = count / kLanes * kLanes;
  const int64_t ahead = ahead_of(pitch * int64_t(sizeof(T)), kColumns_);
  for (int64_t k = 0; k < whole; k += kLanes) {
    const T* here[kColumns_];
    for (int c = 0; c < kColumns_; ++c) here[c] = rows[c] + k;
    if (k * int64_t(sizeof(T)) % 64 == 0) {  // a cache line
      for (int c = 0; c < kColumns_; ++c) prefetch_early(here[c], ahead);
    }
    add_products<kColumns_, kRows>(here, x + k, sums);
  }
  if (whole < count) {
    Tails<T> tails{};
    const T* here[kColumns_];
    for (int c = 0; c < kColumns_; ++c) {
      memcpy(tails.elements[c], rows[c] + whole, size_t(count - whole) * sizeof(T));
      here[c] = tails.elements[c];
    }
    add_products<kColumns_, kRows>(here, x + whole, sums);
  }
  for (int c = 0; c < kColumns_; ++c) {
    for (int r = 0; r < kRows; ++r) totals[r * kColumns + c] += sum_of_lanes(sums[c][r]);
  }
}

// How many rows of the weight go through registers at a time, beside so many rows of x: each has a
// sum for each of these.
constexpr int at_once(int rows) {
  if (rows == 1) return Vec::size == kLanes ? 4 : 2;
  if (rows == 8) return 3;
  return kMostAtOnce == 8 ? 4 : 1;
}

template <int kRows, class T>
inline void multiply_block(const T* weight, int64_t pitch, int64_t columns, const float* x,
                           int64_t count, float* totals) {
  constexpr int kStep = at_once(kRows);
  int64_t c = 0;
  for (; c + kStep <= columns; c += kStep) {
    multiply<kStep, kRows>(weight + c * pitch, pitch, x, count, totals + c);
  }
  for (; c < columns; ++c) multiply<1, kRows>(weight + c * pitch, pitch, x, count, totals + c);
}

// Rows of x as floats, of which the last used ones are kept: of a call with few rows that are not
// longer than a chunk, all of them.
class FactorsOfX {
 public:
  // `count` elements of `rows` rows, from number `first` and number k on, with zeros to the next
  // multiple of kLanes, and rows of zeros behind them.
  const float* read(const SkinnyLinear& call, int64_t first, int64_t rows, int64_t k,
                    int64_t count) {
    if (first == first_ && k == k_) return chunk_.floats;
    first_ = first, k_ = k;
    for (int64_t r = 0; r < kMostAtOnce; ++r) {
      float* target = chunk_.floats + r * Chunk::kPitch;
      const int64_t end = (count + kLanes - 1) / kLanes * kLanes;
      const int64_t filled = r < rows ? count : 0;
      if (filled > 0) {
        const Pointer<Any> source = call.row_of_x<Any>(first + r) + k;
        for_each_vector(0, count, [&](int64_t i, int lanes) {
          Vec::load(source + i, lanes).store(target + i, lanes);
        });
      }
      for (int64_t i = filled; i < end; ++i) target[i] = 0;
    }
    return chunk_.floats;
  }

 private:
  Chunk chunk_;
  int64_t first_ = -1, k_ = -1;
};

// The sums of all rows for `columns` rows of the weight, of which the first one is number `begin`:
// totals[row * kColumns + column].
template <class T>
inline void sums_of_block(const SkinnyLinear& call, int64_t begin, int64_t columns,
                          FactorsOfX& factors, float* totals) {
  for (int64_t i = 0; i < kMostRows * kColumns; ++i) totals[i] = 0;
  const int64_t pitch = call.weight.pitch;
  const T* weight = call.weight.row<T>(begin).address;
  for (int64_t k = 0; k < call.length; k += kChunk) {
    const int64_t count = call.length - k < kChunk ? call.length - k : kChunk;
    int64_t rows = 0;
    for (int64_t first = 0; first < call.rows; first += rows) {
      const int64_t left = call.rows - first;
      rows = left < kMostAtOnce ? left : kMostAtOnce;
      const float* x = factors.read(call, first, rows, k, count);
      float* here = totals + first * kColumns;
      // Rows that are not there are zeros; nobody looks at their sums.
      if (rows > 4) {
        multiply_block<kMostAtOnce>(weight + k, pitch, columns, x, count, here);
      } else if (rows > 1) {
        multiply_block<4>(weight + k, pitch, columns, x, count, here);
      } else {
        multiply_block<1>(weight + k, pitch, columns, x, count, here);
      }
    }
  }
}

inline void multiply_columns(const SkinnyLinear& call, int64_t begin, int64_t end) {
  FactorsOfX factors;
  with_storage_type(call.weight.dtype, [&](auto storage) {
    for_each_block(call, begin, end, [&](int64_t first, int64_t columns, float* totals) {
      sums_of_block<decltype(storage)>(call, first, columns, factors, totals);
    });
  });
}
