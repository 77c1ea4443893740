// The choice of experts for tokens by their logits, the weights of the choices, the sums over
// tokens that losses are made of, and the gradients of all these. No torch: plain pointers and
// numbers.
#pragma once

#include <algorithm>
#include <cmath>

#include "common/math.h"
#include "common/rows.h"
#include "common/simd/isa.h"
#include "moe/assign.h"

namespace dsx {

constexpr float kLeastSum = 1e-20f;  // added to what is divided by

// What a weight is: a probability among all experts, the sigmoid of a logit, or a probability among
// the chosen ones.
enum class Score : int8_t { softmax, sigmoid, softmax_topk };

struct RouteOptions {
  int64_t tokens, experts, k;  // 1 <= k <= experts <= kMostExperts
  Score score;
  bool normalize;  // weights are divided by their sum
  float scale;     // and multiplied by this
};

// A token's choices and weights have the same bits in any batch and at any index in it.
struct Route {
  RouteOptions options;
  int64_t groups, topk_groups;  // experts / groups in each, k of them in topk_groups at least
  Rows logits;
  Rows bias;                // one row, added for the choice alone; absent: none
  int64_t* chosen;          // [tokens, k] written, the best one first
  float* weights;           // [tokens, k] written
  float* partials;          // [tiles, experts + 1] written: the sums over the tokens of a tile
  float* probability_sums;  // [experts] written
  float* z_sum;             // one number, written: of the squared logarithms of sums of powers
};

struct RouteBackward {
  RouteOptions options;
  Rows logits;
  const int64_t* chosen;               // [tokens, k]; what is no expert's number has no gradient
  const float* grad_weights;           // [tokens, k]; null: none
  const float* grad_probability_sums;  // [experts]; null: none
  const float* grad_z_sum;             // one number; null: none
  Rows grad_logits;                    // written
};

// Up to so many tokens, if their choices are few, one kernel on CUDA does all.
constexpr int64_t kFewTokens = 64;

// Sums over tokens are made of those of tiles, which follow from how many tokens there are.
constexpr int64_t kLeastOfTile = 32, kMostTiles = 4096;
inline int64_t tokens_of_tile(int64_t tokens) {
  return std::max(kLeastOfTile, ceil_div(tokens, kMostTiles));
}

// Numbers in the order of floats: 0 is below all of them, NaN above, and -0 is 0.
DSX_HOST_DEVICE inline uint32_t rank_of(float value) {
  if (value != value) return UINT32_MAX;
  const uint32_t bits = bits_of(value + 0.0f);
  return bits ^ (bits >> 31 != 0 ? UINT32_MAX : 1u << 31);
}

// From the gradient of a weight to that of what it was before it was normalized and multiplied;
// of Score::softmax_topk, divided by the weight, to that of the logit.
struct WeightGradients {
  float shift, factor;

  // `sum` is that of the weights before, `dot` that of their products with the gradients.
  DSX_HOST_DEVICE WeightGradients(const RouteOptions& options, float sum, float dot)
      : shift(0.0f), factor(options.scale) {
    if (options.score == Score::softmax_topk) {
      shift = dot;
    } else if (options.normalize) {
      factor = options.scale / (sum + kLeastSum);
      shift = dot / (sum + kLeastSum);
    }
  }
  DSX_HOST_DEVICE float of(float grad) const { return (grad - shift) * factor; }
};

// What the weights of a token are multiplied by; `sum` is that of the weights before.
DSX_HOST_DEVICE inline float factor_of_weights(const RouteOptions& options, float sum) {
  if (options.score == Score::softmax_topk) return options.scale / sum;
  return options.normalize ? options.scale / (sum + kLeastSum) : options.scale;
}

// Tiles [begin, end), or tokens. Disjoint ranges may run on different threads. Never throws.
void route_cpu(Isa isa, const Route& call, int64_t begin, int64_t end);
void route_backward_cpu(Isa isa, const RouteBackward& call, int64_t begin, int64_t end);
// After: adds up the tiles.
void add_tiles_cpu(const Route& call);

// Queue all of it on the stream (cudaStream_t). They throw std::runtime_error. The first one gives
// choices their rows, too; what it is to give rows to is what it writes.
void route_cuda(const Route& call, const Assign& assign, void* stream);
void route_backward_cuda(const RouteBackward& call, void* stream);

}  // namespace dsx
