// The instruction sets that kernels are compiled for, and which of them this process uses.
#pragma once

#include <string>

namespace dsx {

// In rising order: a CPU that has one has those before it. The baseline is what every CPU of an
// architecture has. Only x86-64 has more.
enum class Isa { scalar, baseline, avx2, avx512 };

const char* name_of(Isa isa);  // of the baseline, that of its instructions: sse2 or neon

// The widest ISA of this CPU, unless the environment variable DSX_FORCE_ISA names another one.
// Decided once per process. Throws std::invalid_argument as choose_isa does, so call it before a
// parallel region, not inside one.
Isa current_isa();

// Whether this CPU has dot products of bytes, AVX512_VNNI, beside Isa::avx512, and DSX_FORCE_ISA
// names no ISA. They are of few kernels, and give no other bits.
bool current_vnni();

// `forced` if it is not empty, else `widest`. Throws if `forced` is unknown or wider than `widest`.
Isa choose_isa(const std::string& forced, Isa widest);

}  // namespace dsx
