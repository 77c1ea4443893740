// Parameters and state as SIMD registers of floats, whatever they are stored as; compiled once per
// ISA.
#include "optimizers/storage_math.inl"

// The elements of a parameter as floats, and their way back into memory.
template <class T>
struct Parameter {
  Pointer<T> source, target;
  Pointer<Any> rounded;  // receives what the model has of a float32 original; or null

  template <class Memory>
  Parameter(const StepTypes& types, const Memory& from, const Memory& to)
      : source(Pointer<T>::to(from.weight(types.weight), dtype_of(types.weight))),
        target(Pointer<T>::to(to.weight(types.weight), dtype_of(types.weight))),
        rounded(Pointer<Any>::to(to.master == nullptr ? nullptr : to.param, types.param)) {}

  void ask_for(int64_t i) const { prefetch((source + i).address); }
  Vec load(int64_t i, int count) const { return Vec::load(source + i, count); }
  void store(int64_t i, Vec value, int count) const {
    value.store(target + i, count);
    if (rounded) value.store(rounded + i, count);
  }
};

template <>
struct Parameter<Split> {
  struct Halves {
    uint16_t* upper;
    int16_t* lower;
  };
  Halves source, target;

  template <class Memory>
  Parameter(const StepTypes& /*types*/, const Memory& from, const Memory& to)
      : source{static_cast<uint16_t*>(from.param), static_cast<int16_t*>(from.master)},
        target{static_cast<uint16_t*>(to.param), static_cast<int16_t*>(to.master)} {}

  void ask_for(int64_t i) const {
    prefetch(source.upper + i);
    prefetch(source.lower + i);
  }
  Vec load(int64_t i, int count) const {
    return join_halves<Vec>(Ints::load(source.upper + i, count),
                            Ints::load(source.lower + i, count));
  }
  void store(int64_t i, Vec value, int count) const {
    const Ints bits = bits_to_split<Ints>(value);
    upper_half(bits).store(target.upper + i, count);
    bits.store(reinterpret_cast<uint16_t*>(target.lower) + i, count);
  }
};

// The state of a parameter as floats, and its way back into memory.
template <class Rule, class T, class Grad>
struct States {
  using Loop = StatesOfLoop<Rule, Grad>;
  static constexpr int kCount = Loop::kCount;
  Pointer<T> sources[kCount], targets[kCount];
  Noise noise;

  States(const StepTypes& types, const StepTensor<Rule::kStates>& tensor,
         const Noise& noise_of_step)
      : noise(noise_of_step) {
    for (int j = 0; j < kCount; ++j) {
      sources[j] = Pointer<T>::to(tensor.source.states[j], dtype_of(types.state));
      targets[j] = Pointer<T>::to(tensor.target.states[j], dtype_of(types.state));
    }
    noise.on = noise.on && types.state == Format::bfloat16;
  }

  void ask_for(int64_t i) const {
    for (int j = 0; j < kCount; ++j) {
      if (!absent(j)) prefetch((sources[j] + i).address);
    }
  }

  void load(int64_t i, int count, Vec (&values)[Rule::kStates]) const {
    for (int j = 0; j < kCount; ++j) {
      if (!absent(j)) values[j] = Vec::load(sources[j] + i, count);
    }
  }

  void store(int64_t i, int count, Vec (&values)[Rule::kStates]) const {
    if (holds<T>(Dtype::bfloat16) && noise.on) {
      const Ints random = random_bits(noise, Ints::from(uint32_t(i)));
      for (int j = 0; j < kCount; ++j) {
        values[j] = round_to_bfloat16(values[j], half_of(random, j));
      }
    }
    for (int j = 0; j < kCount; ++j) {
      if (!absent(j)) values[j].store(targets[j] + i, count);
    }
  }

 private:
  bool absent(int j) const { return Loop::absent(sources[j].address); }
};

// The same for state in codes, for which a block is read and written as a whole: new values wait
// in a buffer until the largest one is known.
template <class Rule, class Grad>
struct CodedStates {
  using Loop = StatesOfLoop<Rule, Grad>;
  static constexpr int kCount = Loop::kCount;
  uint8_t* sources[kCount];
  uint8_t* targets[kCount];
  const float* source_scales[kCount];
  float* target_scales[kCount];
  Noise noise;
  float scale[kCount]{};  // of the block at hand
  Ints largest[kCount];   // bits of the largest magnitudes so far, by lane
  float (*buffers)[kCodesBlock];

  CodedStates(const StepTensor<Rule::kStates>& tensor, const Noise& noise_of_step,
              float (*buffers_of_loop)[kCodesBlock])
      : noise(noise_of_step), buffers(buffers_of_loop) {
    for (int j = 0; j < kCount; ++j) {
      sources[j] = static_cast<uint8_t*>(tensor.source.states[j]);
      targets[j] = static_cast<uint8_t*>(tensor.target.states[j]);
      source_scales[j] = tensor.source.scales[j];
      target_scales[j] = tensor.target.scales[j];
    }
  }

  void begin_block(int64_t begin) {
    for (int j = 0; j < kCount; ++j) {
      if (!absent(j)) scale[j] = source_scales[j][begin / kCodesBlock];
      largest[j] = Ints(0u);
    }
  }

  void load(int64_t i, int count, Vec (&values)[Rule::kStates]) const {
    for (int j = 0; j < kCount; ++j) {
      if (absent(j)) continue;
      const Ints code = shift_left<24>(Ints::load(sources[j] + i, count));
      values[j] = decode<Vec>(code, scale[j], Rule::is_signed(j));
    }
  }

  // Lanes beyond `count` come from zeros, so they are no larger than the others.
  void store(int64_t i, int count, const Vec (&values)[Rule::kStates]) {
    for (int j = 0; j < kCount; ++j) {
      if (absent(j)) continue;
      largest[j] = max(largest[j], bits_of(Rule::is_signed(j) ? abs(values[j]) : values[j]));
      values[j].store(buffers[j] + (i & (kCodesBlock - 1)), count);
    }
  }

  void end_block(int64_t begin, int64_t end) {
    float inverse[kCount] = {};
    for (int j = 0; j < kCount; ++j) {
      if (absent(j)) continue;
      const float new_scale = scale_of_block(max_of(largest[j]));
      inverse[j] = inverse_of_scale(new_scale);
      target_scales[j][begin / kCodesBlock] = new_scale;
    }
    for_each_vector(begin, end, [&](int64_t i, int count) {
      const Ints random = noise.on ? random_bits(noise, Ints::from(uint32_t(i))) : Ints(kNearest);
      for (int j = 0; j < kCount; ++j) {
        if (absent(j)) continue;
        const Vec value = Vec::load(buffers[j] + (i & (kCodesBlock - 1)), count);
        const Ints code = encode(value, inverse[j], half_of(random, j), Rule::is_signed(j));
        shift_right<24>(code).store(targets[j] + i, count);
      }
    });
  }

 private:
  bool absent(int j) const { return Loop::absent(sources[j]); }
};
