// activation(x + bias), element by element, and its gradients. No torch: plain pointers and
// numbers.
#pragma once

#include "common/rows.h"
#include "common/simd/isa.h"
#include "common/activation.h"

namespace dsx {

struct BiasActivation {
  int64_t rows, length;
  Activation activation;
  Rows x;
  Rows bias;  // one row for all; absent: zeros
  Rows out;   // written
};

struct BiasActivationBackward {
  int64_t rows, length;
  Activation activation;
  Rows grad_out, x;
  Rows bias;    // one row for all; absent: zeros
  Rows grad_x;  // written
  Rows sums;    // of grad_x over each group of rows: a row for each, written; absent: not wanted
};

// Elements [begin, end) of all rows one after the other. Disjoint ranges may run on different
// threads; the bits depend neither on them nor on the ISA. Never throws.
void bias_activation_cpu(Isa isa, const BiasActivation& call, int64_t begin, int64_t end);

// The gradient of the bias adds up over all rows: first those of each group, then the groups in
// their order; the sums of a single group are the gradient. A tile is what a group has of so many
// columns; the tiles of a group follow each other. So it depends neither on threads nor on the ISA.
constexpr int64_t kRowsOfGroup = 256;
constexpr int64_t kColumnsOfTile = 4096;

// Tiles [begin, end). Never throws.
void bias_activation_backward_cpu(Isa isa, const BiasActivationBackward& call, int64_t begin,
                                  int64_t end);

// Elements [begin, end) of the gradient of the bias. Never throws.
void add_bias_partials_cpu(Isa isa, const float* partials,  // [groups, length]
                           int64_t groups, int64_t length, int64_t begin, int64_t end,
                           Rows grad_bias);  // one row, written

// Queue the same on the stream (cudaStream_t). They throw std::runtime_error.
void bias_activation_cuda(const BiasActivation& call, void* stream);
void bias_activation_backward_cuda(const BiasActivationBackward& call, void* stream);
void add_bias_partials_cuda(const float* partials,  // [groups, length]
                            int64_t groups, int64_t length,
                            Rows grad_bias,  // one row, written
                            void* stream);

// How many groups of rows there are on CUDA.
int64_t bias_activation_groups_cuda(int64_t rows);

}  // namespace dsx
