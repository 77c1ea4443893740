// Fingerprints on the CPU: walks a range of the tensor row and adds up what each piece has.
#include "optimizers/fingerprint.h"

#include <atomic>

#include "optimizers/chunks.h"
#include "common/simd/prefetch.h"

#define DSX_KERNEL_SOURCE "optimizers/fingerprint_cpu.inl"
#include "common/simd/foreach_isa.h"

namespace dsx {

void add_fingerprints_cpu(Isa isa, const Bytes* tensors, const int64_t* tensor_begin, int64_t count,
                          int64_t begin, int64_t end, uint64_t* fingerprints) {
  // Of these loops GCC 12 makes whole multiplications of 64 bits in AVX-512: half as fast.
  if (isa == Isa::avx512) isa = Isa::avx2;
  for_each_piece<kBlockBytes>(tensor_begin, count, begin, end,
                              [&](int64_t index, int64_t piece_begin, int64_t piece_end) {
    const Bytes& tensor = tensors[index];
    const auto data = static_cast<const char*>(tensor.data);
    uint64_t bits = DSX_DISPATCH_ISA(isa, bits_of_blocks(data, piece_begin, piece_end));
    if (piece_end == tensor.bytes) bits += scalar::mixed(uint64_t(tensor.bytes));
    // Other threads may have other pieces of the tensor; their order makes no difference.
    std::atomic_ref(fingerprints[index]).fetch_add(bits, std::memory_order_relaxed);
  });
}

}  // namespace dsx
