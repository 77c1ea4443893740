// Each activation once, for a SIMD register or for floats in CUDA: its value at x, and `grad` times
// its derivative there. What a caller does not use of the two, the compiler leaves out.

template <class V>
struct Activated {
  V value, grad;
};

// Ramachandran, Zoph & Le, "Searching for Activation Functions", 2017, with beta 1.
struct Silu {
  template <class V>
  DSX_INLINE static Activated<V> at(const V& x, const V& grad) {
    const V s = sigmoid(x);  // which has the derivative s (1 - s)
    const V value = x * s;
    return {value, grad * (s + value * (V(1.0f) - s))};
  }
};

// Hendrycks & Gimpel, "Gaussian Error Linear Units", 2016, section 2, as are the next two. Where 1
// and erf cancel, the distribution does not.
struct Gelu {
  template <class V>
  DSX_INLINE static Activated<V> at(const V& x, const V& grad) {
    const auto n = normal(x);
    return {x * n.distribution, grad * multiply_add(x, n.density, n.distribution)};
  }
};

// Its value for a result that is stored as T, of 16 bits.
template <class T>
struct RoughGelu {
  template <class V>
  DSX_INLINE static Activated<V> at(const V& x, const V& grad) {
    return {x * rough_normal<T>(x), grad};
  }
};

// (1 + tanh(u)) / 2 is sigmoid(2 u).
struct GeluTanh {
  template <class V>
  DSX_INLINE static Activated<V> at(const V& x, const V& grad) {
    constexpr float kLinear = 1.5957691f, kCubic = 0.071354816f;  // sqrt(8 / pi), 0.044715 of it
    const V square = at_most(x * x, 256.0f);  // beyond, s is 0 or 1; keeps the slope finite
    const V s = rough_sigmoid(x * multiply_add(square, V(kCubic), V(kLinear)));
    const V slope = multiply_add(square, V(3 * kCubic), V(kLinear));
    const V value = x * s;
    return {value, grad * multiply_add(value * (V(1.0f) - s), slope, s)};
  }
};

struct GeluQuick {
  template <class V>
  DSX_INLINE static Activated<V> at(const V& x, const V& grad) {
    const V s = rough_sigmoid(x * V(1.702f));
    const V value = x * s;
    return {value, grad * multiply_add(value * (V(1.0f) - s), V(1.702f), s)};
  }
};

struct Relu {
  template <class V>
  DSX_INLINE static Activated<V> at(const V& x, const V& grad) {
    return {max(x, V(0.0f)), select(x <= V(0.0f), V(0.0f), grad)};
  }
};

// Calls body with the struct above that this one names.
template <class Body>
DSX_HOST_DEVICE inline void with_activation(Activation activation, const Body& body) {
  switch (activation) {
    case Activation::gelu: return body(Gelu{});
    case Activation::gelu_tanh: return body(GeluTanh{});
    case Activation::gelu_quick: return body(GeluQuick{});
    case Activation::relu: return body(Relu{});
    case Activation::silu: return body(Silu{});
  }
}
