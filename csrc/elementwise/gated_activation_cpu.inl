// The loops of gated activations over a range of elements.
#include "common/activation_math.inl"
#include "elementwise/float_blocks.inl"
#include "elementwise/gated_activation_math.inl"

template <class T>
inline void gate_block(const GatedActivation& call, int64_t row, int64_t i, int count,
                       bool past_cache) {
  Block blocks[3];
  const T* gate = read_block<T>(call.gate.row<Any>(row) + i, count, blocks[0]);
  const T* up = read_block<T>(call.up.row<Any>(row) + i, count, blocks[1]);
  const Room<T> out(call.out.row<Any>(row) + i, count, blocks[2], past_cache);
  with_activation(call.activation, [&](auto activation) {
    for (int k = 0; k < count; k += Values::size) {
      ask_for(gate + k);
      ask_for(up + k);
      const Values gates = Values::load(gate + k, Values::size),
                   ups = Values::load(up + k, Values::size);
      out.store(k, gated<decltype(activation)>(gates, ups));
    }
  });
  out.finish();
}

inline void gate_elements(const GatedActivation& call, int64_t begin, int64_t end) {
  const bool past_cache = go_past_cache(call.out, call.rows, call.length);
  for_each_block(call.length, begin, end, [&](int64_t row, int64_t i, int count) {
    with_block_type(count, [&](auto storage) {
      gate_block<decltype(storage)>(call, row, i, count, past_cache);
    }, call.gate, call.up, call.out);
  });
  end_past_cache();
}

struct GradsPastCache {
  bool gate, up;
};

template <class T>
inline void backward_of_block(const GatedActivationBackward& call, int64_t row, int64_t i,
                              int count, const GradsPastCache& past_cache) {
  Block blocks[5];
  const T* gate = read_block<T>(call.gate.row<Any>(row) + i, count, blocks[0]);
  const T* up = read_block<T>(call.up.row<Any>(row) + i, count, blocks[1]);
  const T* grad = read_block<T>(call.grad_out.row<Any>(row) + i, count, blocks[2]);
  const Room<T> grad_gate(call.grad_gate.row<Any>(row) + i, count, blocks[3], past_cache.gate);
  const Room<T> grad_up(call.grad_up.row<Any>(row) + i, count, blocks[4], past_cache.up);
  with_activation(call.activation, [&](auto activation) {
    for (int k = 0; k < count; k += Values::size) {
      ask_for(gate + k);
      ask_for(up + k);
      ask_for(grad + k);
      const GatedGrads<Values> grads = gated_grads<decltype(activation)>(
          Values::load(grad + k, Values::size), Values::load(gate + k, Values::size),
          Values::load(up + k, Values::size));
      grad_gate.store(k, grads.gate);
      grad_up.store(k, grads.up);
    }
  });
  grad_gate.finish();
  grad_up.finish();
}

inline void backward_of_elements(const GatedActivationBackward& call, int64_t begin, int64_t end) {
  const GradsPastCache past_cache{go_past_cache(call.grad_gate, call.rows, call.length),
                                  go_past_cache(call.grad_up, call.rows, call.length)};
  for_each_block(call.length, begin, end, [&](int64_t row, int64_t i, int count) {
    with_block_type(count, [&](auto storage) {
      backward_of_block<decltype(storage)>(call, row, i, count, past_cache);
    }, call.gate, call.up, call.grad_out, call.grad_gate, call.grad_up);
  });
  end_past_cache();
}
