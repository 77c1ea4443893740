// The ceilings of memory on the CPU: of an Adam step, which reads four streams of floats and writes
// three, and of a norm, which reads one.
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

#ifdef __x86_64__
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
static uint64_t sum_of(const uint64_t* a, int64_t n) {
  constexpr int64_t kBlock = 32;    // 256 bytes
  constexpr int64_t kAhead = 1024;  // 8 KiB: without it an EPYC reads a fifth slower
  uint64_t sum = 0;
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    for (int64_t k = 0; k < kBlock; k += 8) __builtin_prefetch(a + i + kAhead + k);
    for (int64_t k = 0; k < kBlock; ++k) sum += a[i + k];
  }
  for (; i < n; ++i) sum += a[i];
  return sum;
}

extern "C" __attribute__((visibility("default"))) void stream(float* a, float* b, float* c,
                                                              const float* d, int64_t n) {
  half_way(a, b, c, d, n);
}

extern "C" __attribute__((visibility("default"))) uint64_t read_all(const uint64_t* a, int64_t n) {
  return sum_of(a, n);
}
