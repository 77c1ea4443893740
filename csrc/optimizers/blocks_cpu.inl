// The weight, gradient and state of a step, whatever they are stored as, as floats in a block of
// kCodesBlock elements: unpacked, updated and packed again in loops of their own. The chain of
// operations through root and quotient is long, and the shorter the rest of its loop, the further a
// processor works ahead. Memory goes on to the end of the last line. Compiled once per ISA.
#include "common/noise_math.inl"
#include "optimizers/storage_math.inl"

// The random bits of the elements from `first` on.
inline Ints random_bits_from(const Noise& noise, int64_t first) {
  return random_bits(noise_from(noise, first), Ints::from(0));
}

template <class Body>
inline void for_each_whole_vector(int64_t count, const Body& body) {
  for (int64_t i = 0; i < count; i += kLine) {
    for (int k = 0; k < kLine; k += Vec::size) body(i + k);
  }
}

template <class T>
void unpack_elements(const void* source, int64_t count, float* floats) {
  for_each_whole_vector(count, [&](int64_t i) {
    Vec::load(static_cast<const T*>(source) + i, Vec::size).store(floats + i, Vec::size);
  });
}

template <class T>
void pack_elements(const float* floats, int64_t count, void* target) {
  for_each_whole_vector(count, [&](int64_t i) {
    Vec::load(floats + i, Vec::size).store(static_cast<T*>(target) + i, Vec::size);
  });
}

// Where the elements are as floats: where they lie, or in the buffer.
inline const float* unpack(Pointer<Any> source, int64_t count, float* buffer) {
  if (source.dtype == Dtype::float32) return static_cast<const float*>(source.address);
  if (source.dtype == Dtype::bfloat16) unpack_elements<BFloat16>(source.address, count, buffer);
  if (source.dtype == Dtype::float16) unpack_elements<Half>(source.address, count, buffer);
  return buffer;
}

// Where new elements are put as floats: where they belong, or in the buffer, from where pack takes
// them.
inline float* place_for(Pointer<Any> target, float* buffer) {
  return target.dtype == Dtype::float32 ? static_cast<float*>(target.address) : buffer;
}

inline void pack(const float* floats, int64_t count, Pointer<Any> target) {
  if (target.address == floats) return;
  if (target.dtype == Dtype::float32) pack_elements<float>(floats, count, target.address);
  if (target.dtype == Dtype::bfloat16) pack_elements<BFloat16>(floats, count, target.address);
  if (target.dtype == Dtype::float16) pack_elements<Half>(floats, count, target.address);
}

inline void unpack_split(const uint16_t* upper, const int16_t* lower, int64_t count,
                         float* floats) {
  for_each_whole_vector(count, [&](int64_t i) {
    const Vec rounded = float_of(Ints::load_upper(upper + i, Vec::size));
    join_halves(rounded, Ints::load(lower + i, Vec::size)).store(floats + i, Vec::size);
  });
}

inline void pack_split(const float* floats, int64_t count, uint16_t* upper, uint16_t* lower) {
  for_each_whole_vector(count, [&](int64_t i) {
    const Ints bits = bits_to_split<Ints>(Vec::load(floats + i, Vec::size));
    round_half_up(bits).store_upper(upper + i, Vec::size);
    bits.store(lower + i, Vec::size);
  });
}

template <bool is_signed>
void unpack_codes(const uint8_t* codes, float scale, int64_t count, float* floats) {
  for_each_whole_vector(count, [&](int64_t i) {
    const Ints code = Ints::load_upper(codes + i, Vec::size);
    decode<Vec>(code, scale, is_signed).store(floats + i, Vec::size);
  });
}

// The scale of a block of new values. Those beyond a tensor's end come from zeros: no larger.
template <bool is_signed>
float scale_of(const float* floats, int64_t count) {
  Ints largest(0u);
  for_each_whole_vector(count, [&](int64_t i) {
    const Vec value = Vec::load(floats + i, Vec::size);
    largest = max(largest, bits_of(is_signed ? abs(value) : value));
  });
  return scale_of_block(max_of(largest));
}

// The codes of states `first_state` and on, which share random bits; `first` is the number of the
// first element.
template <int first_state, bool... is_signed>
void pack_codes(const float* const* floats, const float* inverse, const Noise& noise, int64_t first,
                int64_t count, uint8_t* const* codes) {
  const auto write = [&](const auto& random) {
    for_each_whole_vector(count, [&](int64_t i) {
      const Ints bits = random(i);
      int k = 0;
      ((encode(Vec::load(floats[k] + i, Vec::size), inverse[k],
               half_in_middle(bits, first_state + k), is_signed)
            .store_upper(codes[k] + i, Vec::size),
        ++k),
       ...);
    });
  };
  if (noise.on) {
    write([&](int64_t i) { return random_bits_from(noise, first + i); });
  } else {
    write([](int64_t) { return Ints(kNearest); });
  }
}

// One tensor, block by block.
template <class Rule>
class Blocks {
 public:
  static constexpr int kStates = Rule::kStates;

  struct Floats {
    const float* old;
    float* renewed;  // the same memory, or apart from it
  };
  Floats weight;
  const float* grad;
  Floats states[kStates];

  Blocks(const StepTypes& types, const StepTensor<kStates>& tensor, const Noise& noise)
      : types_(types), tensor_(tensor), noise_(noise) {}

  bool has_state(int j) const { return types_.has_state(j); }

  void unpack_all(int64_t begin, int64_t end) {
    const int64_t count = end - begin;
    if (types_.weight == Format::split) {
      weight = {buffers_[0], buffers_[0]};
      unpack_split(static_cast<const uint16_t*>(tensor_.source.param) + begin,
                   static_cast<const int16_t*>(tensor_.source.master) + begin, count, buffers_[0]);
    } else {
      weight = {unpack(weight_of(tensor_.source) + begin, count, buffers_[0]),
                place_for(weight_of(tensor_.target) + begin, buffers_[0])};
    }
    if (reads_grads(pass_of<Rule>())) {
      grad = unpack(Pointer<Any>::to(tensor_.grad, types_.grad) + begin, count, buffers_[1]);
    } else {
      grad = weight.old;  // not looked at
    }
    unpack_states(tensor_.source, begin, end);
  }

  void unpack_renewed_states(int64_t begin, int64_t end) {  // as they were stored
    unpack_states(tensor_.target, begin, end);
  }

  void pack_weight(int64_t begin, int64_t end) const {
    const StepMemory<kStates>& target = tensor_.target;
    const int64_t count = end - begin;
    if (types_.weight == Format::split) {
      pack_split(weight.renewed, count, static_cast<uint16_t*>(target.param) + begin,
                 static_cast<uint16_t*>(target.master) + begin);
      return;
    }
    pack(weight.renewed, count, weight_of(target) + begin);
    if (target.master == nullptr) return;
    pack(weight.renewed, count, Pointer<Any>::to(target.param, types_.param) + begin);
  }

  void pack_states(int64_t begin, int64_t end) const {
    const int64_t count = end - begin;
    if (types_.state == Format::codes) return pack_codes_from<0>(begin, count);
    if (types_.state == Format::bfloat16 && noise_.on) round_states(begin, count);
    for (int j = 0; j < kStates; ++j) {
      if (has_state(j)) pack(states[j].renewed, count, state_of(tensor_.target, j) + begin);
    }
  }

 private:
  using Memory = StepMemory<kStates>;

  Pointer<Any> weight_of(const Memory& memory) const {
    return Pointer<Any>::to(memory.weight(types_.weight), dtype_of(types_.weight));
  }
  Pointer<Any> state_of(const Memory& memory, int j) const {
    return Pointer<Any>::to(memory.states[j], dtype_of(types_.state));
  }
  static uint8_t* codes_of(const Memory& memory, int j) {
    return static_cast<uint8_t*>(memory.states[j]);
  }

  void unpack_states(const Memory& source, int64_t begin, int64_t end) {
    unpack_from<0>(source, begin, end - begin);
  }

  template <int j>
  void unpack_from(const Memory& source, int64_t begin, int64_t count) {
    if constexpr (j < kStates) {
      float* const buffer = state_buffers_[j];
      if (!has_state(j)) {
        states[j] = {};
      } else if (types_.state == Format::codes) {
        const float scale = source.scales[j][begin / kCodesBlock];
        unpack_codes<Rule::is_signed(j)>(codes_of(source, j) + begin, scale, count, buffer);
        states[j] = {buffer, buffer};
      } else {
        states[j] = {unpack(state_of(source, j) + begin, count, buffer),
                     place_for(state_of(tensor_.target, j) + begin, buffer)};
      }
      unpack_from<j + 1>(source, begin, count);
    }
  }

  void round_states(int64_t begin, int64_t count) const {
    for_each_whole_vector(count, [&](int64_t i) {
      const Ints random = random_bits_from(noise_, begin + i);
      for (int j = 0; j < kStates; ++j) {
        if (!has_state(j)) continue;
        float* const floats = states[j].renewed + i;
        const Vec value = Vec::load(floats, Vec::size);
        round_to_bfloat16(value, half_of(random, j)).store(floats, Vec::size);
      }
    });
  }

  template <int j>  // an even one: it shares random bits with the next
  void pack_codes_from(int64_t begin, int64_t count) const {
    if constexpr (j < kStates) {
      bool has_next = false;
      if constexpr (j + 1 < kStates) {
        has_next = has_state(j + 1);
        if (has_next && has_state(j)) pack_codes_of<j, j + 1>(begin, count);
        if constexpr (j >= Rule::kRequiredStates) {
          if (has_next && !has_state(j)) pack_codes_of<j + 1>(begin, count);
        }
      }
      if constexpr (j + 1 >= Rule::kRequiredStates) {
        if (has_state(j) && !has_next) pack_codes_of<j>(begin, count);
      }
      pack_codes_from<j + 2>(begin, count);
    }
  }

  template <int... j>
  void pack_codes_of(int64_t begin, int64_t count) const {
    constexpr int numbers[] = {j...};
    const float* const floats[] = {states[j].renewed...};
    const float inverse[] = {new_inverse<j>(begin, count)...};
    uint8_t* const targets[] = {codes_of(tensor_.target, j) + begin...};
    pack_codes<numbers[0] % 2, Rule::is_signed(j)...>(floats, inverse, noise_, begin, count,
                                                      targets);
  }

  template <int j>
  float new_inverse(int64_t begin, int64_t count) const {
    const float scale = scale_of<Rule::is_signed(j)>(states[j].renewed, count);
    tensor_.target.scales[j][begin / kCodesBlock] = scale;
    return inverse_of_scale(scale);
  }

  const StepTypes& types_;
  const StepTensor<kStates>& tensor_;
  const Noise& noise_;
  alignas(64) float buffers_[2][kCodesBlock];
  alignas(64) float state_buffers_[kStates][kCodesBlock];
};

// The update of `count` elements. `is_usual`: the usual states are there, no more and no less.
template <class Rule, bool is_usual>
__attribute__((flatten, noinline)) void update_block(const typename Rule::Constants& of_tensor,
                                                     const Blocks<Rule>& at, int64_t count) {
  constexpr Pass pass = pass_of<Rule>();
  constexpr int kMost = is_usual ? Rule::kUsualStates : Rule::kStates;
  // Local copies, which no store below can change.
  const typename Rule::Constants constants = of_tensor;
  const auto weight = at.weight;
  const float* const grads = at.grad;
  typename Blocks<Rule>::Floats states[Rule::kStates];
  for (int j = 0; j < kMost; ++j) states[j] = at.states[j];
  for_each_whole_vector(count, [&](int64_t i) {
    const Vec grad = Vec::load(grads + i, Vec::size);
    Vec param = Vec::load(weight.old + i, Vec::size);
    Vec values[Rule::kStates]{};
    for (int j = 0; j < kMost; ++j) {
      if (is_usual || states[j].old) values[j] = Vec::load(states[j].old + i, Vec::size);
    }
    update(constants, grad, param, values);
    if constexpr (writes_weights(pass)) param.store(weight.renewed + i, Vec::size);
    for (int j = 0; writes_states(pass) && j < kMost; ++j) {
      if (is_usual || states[j].old) values[j].store(states[j].renewed + i, Vec::size);
    }
  });
}

// The sums of squares that a rule measures; `first` is the number of the first in the chunk.
template <class Rule>
inline void measure_block(const typename Rule::Constants& of_tensor, const Blocks<Rule>& at,
                          int64_t first, int64_t count, Sum16 (&sums)[kMeasured]) {
  const typename Rule::Constants constants = of_tensor;
  for_each_vector(0, count, [&](int64_t i, int lanes) {
    const Vec grad = Vec::load(at.grad + i, Vec::size);
    const Vec param = Vec::load(at.weight.old + i, Vec::size);
    Vec values[Rule::kStates]{}, measured[kMeasured];
    for (int j = 0; j < Rule::kStates; ++j) {
      if (at.has_state(j)) values[j] = Vec::load(at.states[j].old + i, Vec::size);
    }
    measure(constants, grad, param, values, measured);
    for (int k = 0; k < kMeasured; ++k) sums[k].add_square(measured[k], first + i, lanes);
  });
}
