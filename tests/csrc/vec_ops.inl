// What test_vec.cpp calls in each ISA: every operation over arrays, any, and for_each_vector.

inline int lanes_of_vec() { return Vec::size; }

#define DEFINE_OP(name, with_vec, with_float)                                                   \
  inline void op_##name(const float* a_begin, const float* b_begin, float* result, int64_t n) { \
    for_each_vector(0, n, [&](int64_t i, int count) {                                           \
      using V [[maybe_unused]] = Vec;                                                           \
      const Vec a [[maybe_unused]] = Vec::load(a_begin + i, count);                             \
      const Vec b [[maybe_unused]] = Vec::load(b_begin + i, count);                             \
      Vec(with_vec).store(result + i, count);                                                   \
    });                                                                                         \
  }
VEC_OPS(DEFINE_OP)
#undef DEFINE_OP

inline bool any_equal(const float* lanes, float value) {
  return any(Vec::load(lanes, Vec::size) == Vec(value));
}

inline int64_t visits(int64_t begin, int64_t end, int64_t* starts, int* counts) {
  int64_t calls = 0;
  for_each_vector(begin, end, [&](int64_t i, int count) {
    starts[calls] = i;
    counts[calls] = count;
    ++calls;
  });
  return calls;
}
