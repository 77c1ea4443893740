// From a dtype known at run time to code that is compiled for it.
#pragma once

#include "common/dtype.h"

namespace dsx {

// Calls body with a value of the storage type of this dtype, which is float32, bfloat16 or float16.
template <class Body>
void with_storage_type(Dtype dtype, const Body& body) {
  switch (dtype) {
    case Dtype::bfloat16: return body(BFloat16{});
    case Dtype::float16: return body(Half{});
    default: return body(float{});
  }
}

}  // namespace dsx
