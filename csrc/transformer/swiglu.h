// silu(gate) * up, element by element, and its gradients. No torch: plain pointers and numbers.
#pragma once

#include "common/rows.h"
#include "common/simd/isa.h"

namespace dsx {

// The tensors are rows because halves of one tensor are; elements know nothing of each other.
struct Swiglu {
  int64_t rows, length;
  Rows gate, up;
  Rows out;  // written
};

struct SwigluBackward {
  int64_t rows, length;
  Rows grad_out, gate, up;
  Rows grad_gate, grad_up;  // written
};

// Elements [begin, end) of all rows one after the other. Disjoint ranges may run on different
// threads; the bits depend neither on them nor on the ISA. Never throw.
void swiglu_cpu(Isa isa, const Swiglu& call, int64_t begin, int64_t end);
void swiglu_backward_cpu(Isa isa, const SwigluBackward& call, int64_t begin, int64_t end);

// Queue the same, for all elements, on the stream (cudaStream_t). They throw std::runtime_error.
void swiglu_cuda(const Swiglu& call, void* stream);
void swiglu_backward_cuda(const SwigluBackward& call, void* stream);

}  // namespace dsx
