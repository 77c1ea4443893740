// The loops of swiglu over a range of elements; T is the storage type of all tensors, or Any.
#include "transformer/swiglu_math.inl"

// Calls body(row, begin, end) for the piece of each row that elements [begin, end) have part in.
template <class Body>
inline void for_each_row_piece(int64_t length, int64_t begin, int64_t end, const Body& body) {
  while (begin < end) {
    const int64_t row = begin / length, row_begin = row * length;
    const int64_t piece_end = row_begin + length < end ? row_begin + length : end;
    body(row, begin - row_begin, piece_end - row_begin);
    begin = piece_end;
  }
}

template <class T>
inline void gate_elements(const Swiglu& call, int64_t begin, int64_t end) {
  for_each_row_piece(call.length, begin, end, [&](int64_t row, int64_t first, int64_t last) {
    const Pointer<T> gate = call.gate.row<T>(row), up = call.up.row<T>(row);
    const Pointer<T> out = call.out.row<T>(row);
    for_each_vector(first, last, [&](int64_t i, int count) {
      gated(Vec::load(gate + i, count), Vec::load(up + i, count)).store(out + i, count);
    });
  });
}

template <class T>
inline void backward_of_elements(const SwigluBackward& call, int64_t begin, int64_t end) {
  for_each_row_piece(call.length, begin, end, [&](int64_t row, int64_t first, int64_t last) {
    const Pointer<T> gate = call.gate.row<T>(row), up = call.up.row<T>(row);
    const Pointer<T> grad_out = call.grad_out.row<T>(row);
    const Pointer<T> grad_gate = call.grad_gate.row<T>(row), grad_up = call.grad_up.row<T>(row);
    for_each_vector(first, last, [&](int64_t i, int count) {
      const GatedGrads<Vec> grads = gated_grads(
          Vec::load(grad_out + i, count), Vec::load(gate + i, count), Vec::load(up + i, count));
      grads.gate.store(grad_gate + i, count);
      grads.up.store(grad_up + i, count);
    });
  });
}
