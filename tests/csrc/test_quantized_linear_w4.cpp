// Tests the kernels of weights with 4 bits.
#include "quantization/formats.h"

constexpr int kBits = 4;
constexpr dsx::QuantFormat kFormats[] = {dsx::QuantFormat::int4, dsx::QuantFormat::nf4};

#include "quantized_linear.inl"
