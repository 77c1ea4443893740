// Two values for one, for formulas that take long from their first operation to their last: the
// processor looks ahead at some hundred operations, which then are of more chains. Bits are the
// same, as each half is worked on as it would be alone.
template <class V>
struct Twice {
  static constexpr int size = 2 * V::size;
  V low, high;

  Twice() = default;
  DSX_INLINE Twice(float value) : low(value), high(value) {}
  DSX_INLINE Twice(const V& low_half, const V& high_half) : low(low_half), high(high_half) {}

  template <class T>
  DSX_INLINE static Twice load(const T* source, int /*count*/) {
    return {V::load(source, V::size), V::load(source + V::size, V::size)};
  }
  template <class T>
  DSX_INLINE void store(T* target, int /*count*/, bool past_cache = false) const {
    low.store(target, V::size, past_cache);
    high.store(target + V::size, V::size, past_cache);
  }
};

template <class M>
struct TwiceMask {
  M low, high;
};

#define DSX_TWICE_UNARY(name)                   \
  template <class V>                            \
  DSX_INLINE Twice<V> name(const Twice<V>& a) { \
    return {name(a.low), name(a.high)};         \
  }
#define DSX_TWICE_BINARY(name)                                     \
  template <class V>                                               \
  DSX_INLINE Twice<V> name(const Twice<V>& a, const Twice<V>& b) { \
    return {name(a.low, b.low), name(a.high, b.high)};             \
  }
#define DSX_TWICE_COMPARISON(name)                                                            \
  template <class V>                                                                          \
  DSX_INLINE auto name(const Twice<V>& a, const Twice<V>& b) {                                \
    return TwiceMask<decltype(name(a.low, b.low))>{name(a.low, b.low), name(a.high, b.high)}; \
  }
DSX_TWICE_UNARY(operator-)
DSX_TWICE_UNARY(abs)
DSX_TWICE_UNARY(exp)
DSX_TWICE_UNARY(sigmoid)
DSX_TWICE_UNARY(rough_sigmoid)
DSX_TWICE_UNARY(bell)
DSX_TWICE_UNARY(reciprocal)
DSX_TWICE_BINARY(operator+)
DSX_TWICE_BINARY(operator-)
DSX_TWICE_BINARY(operator*)
DSX_TWICE_BINARY(operator/)
DSX_TWICE_BINARY(max)
DSX_TWICE_COMPARISON(operator<)
DSX_TWICE_COMPARISON(operator<=)
#undef DSX_TWICE_UNARY
#undef DSX_TWICE_BINARY
#undef DSX_TWICE_COMPARISON

template <class V>
DSX_INLINE Twice<V> multiply_add(const Twice<V>& a, const Twice<V>& b, const Twice<V>& c) {
  return {multiply_add(a.low, b.low, c.low), multiply_add(a.high, b.high, c.high)};
}
template <class V>
DSX_INLINE Twice<V> at_most(const Twice<V>& a, float most) {
  return {at_most(a.low, most), at_most(a.high, most)};
}
template <class M, class V>
DSX_INLINE Twice<V> select(const TwiceMask<M>& mask, const Twice<V>& a, const Twice<V>& b) {
  return {select(mask.low, a.low, b.low), select(mask.high, a.high, b.high)};
}
