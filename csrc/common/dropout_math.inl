// The random bits of dropout.h, element by element, as those of noise_math.inl, which this needs.

// By one more round than what rounds numbers has: bits of elements that are far apart must not be
// related either. Of one round alone those 2^16 apart are, by 20 standard errors in 4 Mi elements.
template <class Ints>
DSX_HOST_DEVICE inline Ints unrelated_bits(const Noise& noise, Ints element) {
  const Ints x = random_bits(noise, element);
  return (x ^ shift_right<15>(x)) * Ints(0xc2b2ae35u);
}
