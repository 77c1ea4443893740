// An elementwise op over rows, for both devices: what kernels are called with. A rule is a struct
// with the options of one op, forward or backward, and says how many tensors that has; all rules
// share the loops (elementwise_cpu.inl, elementwise_cuda.cu). The formula of a rule, in
// <op>_math.inl, is formula(rule, option, in, out), for a SIMD register or for floats in CUDA: it
// reads each in[i], to which its bias has been added, and sets each out[k]. No torch: plain
// pointers and numbers.
#pragma once

#include <concepts>

#include "common/activation.h"
#include "common/dropout.h"
#include "common/rows.h"
#include "common/simd/isa.h"

namespace dsx {

template <class Rule>
concept IsRule = requires {
  { Rule::kOp } -> std::convertible_to<const char*>;
  { Rule::kIn } -> std::convertible_to<int>;
  { Rule::kOut } -> std::convertible_to<int>;
  { Rule::is_biased(0) } -> std::same_as<bool>;
};

// Whether an input may be absent; a rule of which one may says so.
template <class Rule>
DSX_HOST_DEVICE constexpr bool is_optional(int i) {
  if constexpr (requires { Rule::is_optional(i); }) return Rule::is_optional(i);
  return false;
}

// Which input is no tensor but the mask of rule.dropout, 1 where an element is kept, else 0; a rule
// with dropout has kKept. Its rows stay absent.
template <class Rule>
constexpr int kept_of() {
  if constexpr (requires { Rule::kKept; }) return Rule::kKept;
  return -1;
}
template <class Rule>
constexpr int kKeptOf = kept_of<Rule>();
template <class Rule>
DSX_HOST_DEVICE inline DropoutMask mask_of(const Rule& rule) {
  if constexpr (kept_of<Rule>() >= 0) return DropoutMask(rule.dropout);
  return {};
}

// Whether its output is the value of its activation and no more, so that CUDA may know what that is
// rounded to; a rule has kIsValue if so.
template <class Rule>
constexpr bool is_value() {
  if constexpr (requires { Rule::kIsValue; }) return Rule::kIsValue;
  return false;
}
template <class Rule>
constexpr bool kIsValueOf = is_value<Rule>();

// Whether sums of the outputs over rows are never wanted, sometimes beside the outputs, or always
// and alone; a rule has kSums if not the first.
enum class Sums { never, beside, alone };
template <class Rule>
constexpr Sums sums_of() {
  if constexpr (requires { Rule::kSums; }) return Rule::kSums;
  return Sums::never;
}
template <class Rule>
constexpr bool kHasSums = sums_of<Rule>() != Sums::never;
template <class Rule>
constexpr bool kHasOut = sums_of<Rule>() != Sums::alone;

template <class Rule>
struct Elementwise {
  int64_t rows, length;
  Rule rule;
  Rows in[Rule::kIn];     // absent: as many zeros
  Rows bias[Rule::kIn];   // one row for all rows of in[i]; absent: zeros
  Rows out[Rule::kOut];   // written; absent: not wanted
  Rows sums[Rule::kOut];  // of out[k] over each group of rows, a row for each; absent likewise

  bool has_sums() const {
    if (!kHasSums<Rule>) return false;
    for (const Rows& each : sums) {
      if (each.is_present()) return true;
    }
    return false;
  }
};

// Elements [begin, end) of all rows one after the other. Disjoint ranges may run on different
// threads; the bits depend neither on them nor on the ISA. Never throws.
template <class Rule>
void elementwise_cpu(Isa isa, const Elementwise<Rule>& call, int64_t begin, int64_t end);

// Sums over all rows are added up first over those of each group, then over the groups in their
// order. A tile is what a group has of so many columns; the tiles of a group follow each other.
constexpr int64_t kRowsOfGroup = 256;
constexpr int64_t kColumnsOfTile = 4096;

// Tiles [begin, end), with the sums. Never throws.
template <class Rule>
void elementwise_tiles_cpu(Isa isa, const Elementwise<Rule>& call, int64_t begin, int64_t end);

// Elements [begin, end) of the sum of all groups. Never throws.
template <class Rule>
void add_groups_cpu(Isa isa, const float* partials,  // [groups, length]
                    int64_t groups, int64_t length, int64_t begin, int64_t end,
                    Rows target);  // one row, written

// Queue the same on the stream (cudaStream_t). They throw std::runtime_error.
template <class Rule>
void elementwise_cuda(const Elementwise<Rule>& call, void* stream);
template <class Rule>
void add_groups_cuda(const float* partials, int64_t groups, int64_t length, Rows target,
                     void* stream);

// How many groups of rows there are on CUDA.
template <class Rule>
int64_t groups_cuda(int64_t rows);

}  // namespace dsx
