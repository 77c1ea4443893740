// Rows in blocks that formulas work on in whole registers, whatever the rows are stored as. What is
// stored as floats, or all of it as bfloat16, is worked on where it lies; of any other mixture, and
// of the end of a row, a block is copied as floats from and to where it lies. So a formula is
// compiled twice for each instruction set, not once for each mixture of dtypes.
#include "elementwise/twice_cpu.inl"

constexpr int kBlock = 512;

// What a formula is worked out for at a time: a Vec, or four of AVX-512 as one.
using Register = std::conditional_t<Vec::size / Vec::registers == 16, Twice<Twice<Vec>>, Vec>;

// Whether so many elements are worked on where they lie.
inline bool are_whole(int count) {
  return count % (Register::size < kLine ? kLine : Register::size) == 0;
}

// What lies behind keeps the same elements of neighbouring blocks from being a multiple of 4096
// bytes apart, which processors take for the same address when a load follows a store.
struct Block {
  alignas(64) float floats[kBlock + 48];
};

// Loops for bfloat16 of their own are for the processors that models are run with.
#ifdef __x86_64__
constexpr int kLeastLanes = 16;
#else
constexpr int kLeastLanes = 4;
#endif

// `count` elements of a row: where they lie, or in the block with zeros behind them; null if
// absent.
template <class T>
inline const T* read_block(Pointer<Any> source, int count, Block& block) {
  const auto there = static_cast<const T*>(source.address);
  if constexpr (std::is_same_v<T, BFloat16>) {
    return there;
  } else {
    if (!source || (source.dtype == Dtype::float32 && are_whole(count))) return there;
    for_each_vector(0, count, [&](int64_t i, int lanes) {
      Vec::load(source + i, lanes).store(block.floats + i, Vec::size);
    });
    return block.floats;
  }
}

// Where whole registers go that are to be stored in a part of a row: there at once, or into the
// block, from which `finish` writes them. Rows that go past the cache do so where a part begins a
// line.
template <class T>
class OutputBlock {
 public:
  OutputBlock(Pointer<Any> target, int count, Block& block, bool past_cache)
      : target_(target), count_(count), past_cache_(past_cache && begins_line(target.address)) {
    if constexpr (std::is_same_v<T, BFloat16>) {
      is_there_ = true;
    } else {
      is_there_ = target.dtype == Dtype::float32 && are_whole(count);
      elements_ = block.floats;
    }
    if (is_there_) elements_ = static_cast<T*>(target.address);
  }

  DSX_INLINE void store(int i, const Register& values) const {
    values.store(elements_ + i, Register::size, is_there_ && past_cache_);
  }

  void finish() const {
    if (is_there_) return;
    for_each_vector(0, count_, [&](int64_t i, int lanes) {
      Vec::load(elements_ + i, lanes).store(target_ + i, lanes, past_cache_);
    });
  }

 private:
  Pointer<Any> target_;
  T* elements_;
  int count_;
  bool past_cache_, is_there_;
};

// Asks for the lines that loops over blocks come to; an element at a time it would cost more than
// it saves.
template <class T>
inline void ask_for(const T* position) {
  if constexpr (Vec::size >= 16) {
    constexpr int kOfLine = 64 / sizeof(T);
    for (int i = 0; i < Register::size; i += kOfLine) prefetch(position + i);
  }
}

// Elements [begin, end) of all rows one after the other: calls body(row, i, count) for the blocks
// of each row that they have part in, from element i on. All but the first begin where blocks of
// whole rows do, as memory is aligned there.
template <class Body>
inline void for_each_block(int64_t length, int64_t begin, int64_t end, const Body& body) {
  while (begin < end) {
    const int64_t row = begin / length, i = begin - row * length;
    const int64_t here = length - i < end - begin ? length - i : end - begin;
    const int64_t left = kBlock - i % kBlock;  // of the block
    const int count = int(here < left ? here : left);
    body(row, i, count);
    begin += count;
  }
}
