// The loops of gated activations over a range of elements.
#include "transformer/activation_math.inl"
#include "transformer/float_blocks.inl"
#include "transformer/gated_activation_math.inl"

inline void gate_elements(const GatedActivation& call, int64_t begin, int64_t end) {
  Block blocks[3];
  const bool past_cache = go_past_cache(call.out, call.rows, call.length);
  const auto gate_block = [&](int64_t row, int64_t i, int count) {
    const float* gate = read_floats(call.gate.row<Any>(row) + i, count, blocks[0]);
    const float* up = read_floats(call.up.row<Any>(row) + i, count, blocks[1]);
    const Room out(call.out.row<Any>(row) + i, blocks[2], past_cache);
    with_activation(call.activation, [&](auto activation) {
      for_each_vector(0, count, [&](int64_t k, int lanes) {
        const Vec gate_here = Vec::load(gate + k, lanes), up_here = Vec::load(up + k, lanes);
        out.store(k, gated<decltype(activation)>(gate_here, up_here), lanes);
      });
    });
    out.finish(count);
  };
  for_each_block(call.length, begin, end, gate_block);
  end_past_cache();
}

inline void backward_of_elements(const GatedActivationBackward& call, int64_t begin, int64_t end) {
  Block blocks[5];
  const bool gate_past_cache = go_past_cache(call.grad_gate, call.rows, call.length);
  const bool up_past_cache = go_past_cache(call.grad_up, call.rows, call.length);
  const auto backward_of_block = [&](int64_t row, int64_t i, int count) {
    const float* gate = read_floats(call.gate.row<Any>(row) + i, count, blocks[0]);
    const float* up = read_floats(call.up.row<Any>(row) + i, count, blocks[1]);
    const float* grad = read_floats(call.grad_out.row<Any>(row) + i, count, blocks[2]);
    const Room grad_gate(call.grad_gate.row<Any>(row) + i, blocks[3], gate_past_cache);
    const Room grad_up(call.grad_up.row<Any>(row) + i, blocks[4], up_past_cache);
    with_activation(call.activation, [&](auto activation) {
      for_each_vector(0, count, [&](int64_t k, int lanes) {
        const GatedGrads<Vec> grads = gated_grads<decltype(activation)>(
            Vec::load(grad + k, lanes), Vec::load(gate + k, lanes), Vec::load(up + k, lanes));
        grad_gate.store(k, grads.gate, lanes);
        grad_up.store(k, grads.up, lanes);
      });
    });
    grad_gate.finish(count);
    grad_up.finish(count);
  };
  for_each_block(call.length, begin, end, backward_of_block);
  end_past_cache();
}
