// The sum of the rows of several ids, for both devices: in the order of ids, in float32, or in
// float64 if elements are of it.
inline DSX_HOST_DEVICE int64_t bytes_of(Number number) {
  return number == Number::float64 ? 8 : number == Number::float32 ? 4 : 2;
}

DSX_HOST_DEVICE inline double to_sum(double value) { return value; }
template <class T>
DSX_HOST_DEVICE float to_sum(T value) {
  return to_float(value);
}

template <class T>
DSX_HOST_DEVICE T number_at(const char* row, int64_t i) {  // at any alignment
  T number;
  memcpy(&number, row + i * int64_t(sizeof(T)), sizeof(T));
  return number;
}

template <class T, class Next>
DSX_HOST_DEVICE void add_numbers_of(const MergeTokens& call, int64_t sample, int32_t first,
                                    int64_t i, const Next& next, char* out) {
  auto sum = to_sum(number_at<T>(call.part.row(sample, first), i));
  for (int32_t id = next(first); id >= 0; id = next(id)) {
    sum += to_sum(number_at<T>(call.part.row(sample, id), i));
  }
  T rounded;
  if constexpr (sizeof(T) == sizeof(double)) {
    rounded = sum;
  } else {
    rounded = from_float<T>(sum);
  }
  memcpy(out + i * int64_t(sizeof(T)), &rounded, sizeof(T));
}

// Element i; next(id) is the next id that names the same token, or below 0.
template <class Next>
DSX_HOST_DEVICE void add_numbers(const MergeTokens& call, int64_t sample, int32_t first, int64_t i,
                                 const Next& next, char* out) {
  switch (call.number) {
    case Number::float32: return add_numbers_of<float>(call, sample, first, i, next, out);
    case Number::bfloat16: return add_numbers_of<BFloat16>(call, sample, first, i, next, out);
    case Number::float16: return add_numbers_of<Half>(call, sample, first, i, next, out);
    case Number::float64: return add_numbers_of<double>(call, sample, first, i, next, out);
  }
}
