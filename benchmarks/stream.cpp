// The ceiling of an Adam step on the CPU: reads four streams of floats and writes three.
#include <cstdint>

#ifdef __x86_64__
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
static void half_way(float* __restrict a, float* __restrict b, float* __restrict c,
                     const float* __restrict d, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    a[i] = 0.5f * (a[i] + d[i]);
    b[i] = 0.5f * (b[i] + d[i]);
    c[i] = 0.5f * (c[i] + d[i]);
  }
}

extern "C" __attribute__((visibility("default"))) void stream(float* a, float* b, float* c,
                                                              const float* d, int64_t n) {
  half_way(a, b, c, d, n);
}
