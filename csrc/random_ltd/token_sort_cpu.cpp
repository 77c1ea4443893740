// token_sort_ on the CPU.
#include "random_ltd/token_sort.h"

#include <algorithm>

namespace dsx {

void token_sort_cpu(const TokenSort& call, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    int32_t* const ids = call.ids + row * call.kept;
    std::sort(ids, ids + call.kept);
  }
}

}  // namespace dsx
