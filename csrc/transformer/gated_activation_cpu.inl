// The loops of gated activations over a range of elements.
#include "transformer/activation_math.inl"
#include "transformer/float_blocks.inl"
#include "transformer/gated_activation_math.inl"

inline void gate_elements(const GatedActivation& call, int64_t begin, int64_t end) {
  Block blocks[3];
  const auto gate_block = [&](int64_t row, int64_t i, int count) {
    const float* gate = read_floats(call.gate.row<Any>(row) + i, count, blocks[0]);
    const float* up = read_floats(call.up.row<Any>(row) + i, count, blocks[1]);
    const Pointer<Any> target = call.out.row<Any>(row) + i;
    float* out = room_for(target, blocks[2]);
    with_activation(call.activation, [&](auto activation) {
      for_each_vector(0, count, [&](int64_t k, int lanes) {
        gated<decltype(activation)>(Vec::load(gate + k, lanes), Vec::load(up + k, lanes))
            .store(out + k, lanes);
      });
    });
    write_floats(target, count, blocks[2]);
  };
  for_each_block(call.length, begin, end, gate_block);
}

inline void backward_of_elements(const GatedActivationBackward& call, int64_t begin, int64_t end) {
  Block blocks[5];
  const auto backward_of_block = [&](int64_t row, int64_t i, int count) {
    const float* gate = read_floats(call.gate.row<Any>(row) + i, count, blocks[0]);
    const float* up = read_floats(call.up.row<Any>(row) + i, count, blocks[1]);
    const float* grad = read_floats(call.grad_out.row<Any>(row) + i, count, blocks[2]);
    const Pointer<Any> gate_target = call.grad_gate.row<Any>(row) + i;
    const Pointer<Any> up_target = call.grad_up.row<Any>(row) + i;
    float* grad_gate = room_for(gate_target, blocks[3]);
    float* grad_up = room_for(up_target, blocks[4]);
    with_activation(call.activation, [&](auto activation) {
      for_each_vector(0, count, [&](int64_t k, int lanes) {
        const GatedGrads<Vec> grads = gated_grads<decltype(activation)>(
            Vec::load(grad + k, lanes), Vec::load(gate + k, lanes), Vec::load(up + k, lanes));
        grads.gate.store(grad_gate + k, lanes);
        grads.up.store(grad_up + k, lanes);
      });
    });
    write_floats(gate_target, count, blocks[3]);
    write_floats(up_target, count, blocks[4]);
  };
  for_each_block(call.length, begin, end, backward_of_block);
}
