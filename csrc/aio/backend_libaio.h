// The Linux aio backend.
#pragma once

#include <memory>

#include "aio/backend.h"

namespace dsx::aio {

// Tries all it needs; throws std::system_error when this kernel or its administrator refuses it,
// EAGAIN when fs.aio-max-nr events of all processes are taken.
std::unique_ptr<Backend> make_libaio_backend(int depth);

}  // namespace dsx::aio
