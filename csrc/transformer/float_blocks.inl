// Rows in blocks of floats, which formulas work on whatever the rows are stored as: so there is one
// loop for each formula, not one for each mixture of dtypes. What is stored as floats is worked on
// where it lies; a block of anything else fits the nearest cache.
constexpr int kBlock = 512;

// The room behind keeps the same places of neighbouring blocks from being a multiple of 4096 bytes
// apart, which processors take for the same place when a load follows a store.
struct Block {
  alignas(64) float floats[kBlock + 48];
};

// `count` elements of a row: where they lie, or in the block.
inline const float* read_floats(Pointer<Any> source, int count, Block& block) {
  if (source.dtype == Dtype::float32) return static_cast<const float*>(source.address);
  const auto read = [&](auto* elements) {
    for_each_vector(0, count, [&](int64_t i, int lanes) {
      Vec::load(elements + i, lanes).store(block.floats + i, lanes);
    });
  };
  if (source.dtype == Dtype::bfloat16) {
    read(static_cast<const BFloat16*>(source.address));
  } else {
    read(static_cast<const Half*>(source.address));
  }
  return block.floats;
}

// Where floats go that are to be stored in a part of a row: there at once, or into the block, from
// which `finish` writes them. Rows that go past the cache do so where the part begins a line.
class Room {
 public:
  Room(Pointer<Any> target, Block& block, bool past_cache)
      : target_(target), past_cache_(past_cache && begins_line(target.address)) {
    const bool is_there = target.dtype == Dtype::float32;
    floats_ = is_there ? static_cast<float*>(target.address) : block.floats;
    floats_past_cache_ = is_there && past_cache_;
  }

  void store(int64_t i, const Vec& value, int lanes) const {
    value.store(floats_ + i, lanes, floats_past_cache_);
  }

  void finish(int count) const {
    const auto write = [&](auto* elements) {
      for_each_vector(0, count, [&](int64_t i, int lanes) {
        Vec::load(floats_ + i, lanes).store(elements + i, lanes, past_cache_);
      });
    };
    if (target_.dtype == Dtype::bfloat16) write(static_cast<BFloat16*>(target_.address));
    if (target_.dtype == Dtype::float16) write(static_cast<Half*>(target_.address));
  }

 private:
  Pointer<Any> target_;
  float* floats_;
  bool past_cache_, floats_past_cache_;
};

// Elements [begin, end) of all rows one after the other: calls body(row, i, count) for the blocks
// of each row that they have part in, from element i on; all but the first begin where blocks of
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
