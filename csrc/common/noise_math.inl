// The random bits of noise.h, element by element. Ints is a SIMD register on the CPU, uint32_t in
// CUDA.

// 32 random bits for each element: a Weyl sequence, then one round of xor, shift and multiply with
// a constant of MurmurHash3. Rounding needs no more: uniform, and unrelated between steps.
template <class Ints>
DSX_HOST_DEVICE inline Ints random_bits(const Noise& noise, Ints element) {
  const Ints x = element * Ints(kWeyl) + Ints(noise.offset);
  return (x ^ shift_right<16>(x) ^ Ints(noise.mask)) * Ints(0x85ebca6bu);
}
