// Makes this thread's arithmetic flush subnormals to zero, as torch.set_flush_denormal does.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
inline void flush_subnormals(bool on) { _mm_setcsr(on ? 0x1f80 | 0x8040 : 0x1f80); }
#elif defined(__aarch64__)
#include <cstdint>
inline void flush_subnormals(bool on) {
  const uint64_t control = on ? uint64_t(1) << 24 : 0;
  asm volatile("msr fpcr, %0" : : "r"(control));
}
#endif
