// What test_vec_math.cpp calls in each ISA: functions of Vec over arrays.
#define DEFINE_FUNCTION(name)                                         \
  inline void all_##name(const float* source, float* result, int n) { \
    for_each_vector(0, n, [&](int64_t i, int count) {                 \
      name(Vec::load(source + i, count)).store(result + i, count);    \
    });                                                               \
  }
DEFINE_FUNCTION(exp)
DEFINE_FUNCTION(exp_of_negative)
DEFINE_FUNCTION(log)
DEFINE_FUNCTION(sigmoid)
DEFINE_FUNCTION(rsqrt)
DEFINE_FUNCTION(erf)
DEFINE_FUNCTION(tanh)
inline Vec distribution(Vec a) { return normal(a).distribution; }
inline Vec density(Vec a) { return normal(a).density; }
DEFINE_FUNCTION(distribution)
DEFINE_FUNCTION(density)
DEFINE_FUNCTION(small_sin)
DEFINE_FUNCTION(small_cos)
#undef DEFINE_FUNCTION
