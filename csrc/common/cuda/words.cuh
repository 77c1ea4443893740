// Memory as words that are not looked at.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace dsx::cuda {

template <class Word>
__device__ void store_streamed(Word* target, const Word& word) {
  if constexpr (sizeof(Word) < 4) {
    *target = word;
  } else {
    __stcs(target, word);
  }
}

// Calls body with the widest word, of at least as many bytes as Least has, that divides all of
// these, which are or'ed: addresses, and distances and lengths in bytes.
template <class Least = uint8_t, class Body>
void with_word(uint64_t bits, const Body& body) {
  if (bits % sizeof(uint4) == 0) return body(uint4{});
  if (bits % sizeof(uint32_t) == 0) return body(uint32_t{});
  if constexpr (sizeof(Least) == 1) {
    if (bits % sizeof(uint16_t) != 0) return body(uint8_t{});
  }
  body(uint16_t{});
}

}  // namespace dsx::cuda
