// Tests the kernels of weights with 8 bits.
#include "quantization/formats.h"

constexpr int kBits = 8;
constexpr dsx::QuantFormat kFormats[] = {dsx::QuantFormat::int8};

#include "quantized_linear.inl"
