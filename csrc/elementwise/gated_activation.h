// activation(gate) * up, element by element, and its gradients. No torch: plain pointers and
// numbers.
#pragma once

#include "common/rows.h"
#include "common/simd/isa.h"
#include "common/activation.h"

namespace dsx {

// The tensors are rows because halves of one tensor are; elements know nothing of each other.
struct GatedActivation {
  int64_t rows, length;
  Activation activation;
  Rows gate, up;
  Rows out;  // written
};

struct GatedActivationBackward {
  int64_t rows, length;
  Activation activation;
  Rows grad_out, gate, up;
  Rows grad_gate, grad_up;  // written
};

// Elements [begin, end) of all rows one after the other. Disjoint ranges may run on different
// threads; the bits depend neither on them nor on the ISA. Never throw.
void gated_activation_cpu(Isa isa, const GatedActivation& call, int64_t begin, int64_t end);
void gated_activation_backward_cpu(Isa isa, const GatedActivationBackward& call, int64_t begin,
                                   int64_t end);

// Queue the same, for all elements, on the stream (cudaStream_t). They throw std::runtime_error.
void gated_activation_cuda(const GatedActivation& call, void* stream);
void gated_activation_backward_cuda(const GatedActivationBackward& call, void* stream);

}  // namespace dsx
