// Finds the widest instruction set of the CPU and applies the override DSX_FORCE_ISA.
#include "common/simd/isa.h"

#include <cstdlib>
#include <stdexcept>

#ifdef __x86_64__
#include <cpuid.h>
#endif

namespace dsx {
namespace {

#if defined(__x86_64__)
constexpr const char* kBaseline = "sse2";
#elif defined(__aarch64__)
constexpr const char* kBaseline = "neon";
#else
constexpr const char* kBaseline = "baseline";
#endif

#ifdef __x86_64__
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

// The compiler's AVX tests include that the operating system saves the wide registers.
Isa widest_isa() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !has_f16c()) {
    return Isa::baseline;
  }
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl");
  return avx512 ? Isa::avx512 : Isa::avx2;
}

bool has_vnni() { return __builtin_cpu_supports("avx512vnni"); }
#else
Isa widest_isa() { return Isa::baseline; }

bool has_vnni() { return false; }
#endif

std::string forced_isa() {
  const char* forced = std::getenv("DSX_FORCE_ISA");
  return forced == nullptr ? "" : forced;
}

}  // namespace

const char* name_of(Isa isa) {
  switch (isa) {
    case Isa::avx512: return "avx512";
    case Isa::avx2: return "avx2";
    case Isa::baseline: return kBaseline;
    case Isa::scalar: break;
  }
  return "scalar";
}

Isa choose_isa(const std::string& forced, Isa widest) {
  if (forced.empty()) return widest;
  std::string available;
  for (Isa isa : {Isa::scalar, Isa::baseline, Isa::avx2, Isa::avx512}) {
    if (isa > widest) break;
    if (forced == name_of(isa)) return isa;
    available += (available.empty() ? "" : ", ") + std::string(name_of(isa));
  }
  throw std::invalid_argument("DSX_FORCE_ISA is " + forced +
                              ", expected one that this library has for this CPU: " + available);
}

Isa current_isa() {
  static const Isa isa = choose_isa(forced_isa(), widest_isa());
  return isa;
}

bool current_vnni() {
  static const bool vnni = current_isa() == Isa::avx512 && forced_isa().empty() && has_vnni();
  return vnni;
}

}  // namespace dsx
