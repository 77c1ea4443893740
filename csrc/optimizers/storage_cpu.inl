// Weights and state as SIMD registers of floats, for storage types known when compiled; compiled
// once per ISA.

// The elements of a weight as floats, and their way back into memory.
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
  Vec load(int64_t i) const { return Vec::load(source + i, Vec::size); }
  void store(int64_t i, Vec value) const {
    value.store(target + i, Vec::size);
    if (rounded) value.store(rounded + i, Vec::size);
  }
};

// The usual states of a parameter as floats, and their way back into memory.
template <class Rule, class T>
struct States {
  static constexpr int kCount = Rule::kUsualStates;
  Pointer<T> sources[kCount], targets[kCount];
  Noise noise;

  States(const StepTypes& types, const StepTensor<Rule::kStates>& tensor,
         const Noise& noise_of_step)
      : noise(noise_of_step) {
    for (int j = 0; j < kCount; ++j) {
      sources[j] = Pointer<T>::to(tensor.source.states[j], dtype_of(types.state));
      targets[j] = Pointer<T>::to(tensor.target.states[j], dtype_of(types.state));
    }
  }

  void ask_for(int64_t i) const {
    for (int j = 0; j < kCount; ++j) prefetch((sources[j] + i).address);
  }

  void load(int64_t i, Vec (&values)[Rule::kStates]) const {
    for (int j = 0; j < kCount; ++j) values[j] = Vec::load(sources[j] + i, Vec::size);
  }

  void store(int64_t i, Vec (&values)[Rule::kStates]) const {
    if (holds<T>(Dtype::bfloat16) && noise.on) {
      const Ints random = random_bits_from(noise, i);
      for (int j = 0; j < kCount; ++j) {
        values[j] = round_to_bfloat16(values[j], half_of(random, j));
      }
    }
    for (int j = 0; j < kCount; ++j) values[j].store(targets[j] + i, Vec::size);
  }
};
