// The backends by name.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "aio/backend.h"

namespace dsx::aio {

enum class BackendKind : uint8_t { io_uring, libaio, threads };

inline constexpr BackendKind backend_kinds[] = {BackendKind::io_uring, BackendKind::libaio,
                                                BackendKind::threads};  // the best first

const char* name_of(BackendKind kind);
BackendKind kind_of(const std::string& name);  // throws std::invalid_argument

// Makes a backend for `depth` ops in flight; throws std::system_error when the kernel refuses it.
std::unique_ptr<Backend> make_backend(BackendKind kind, int depth);

// What helps when the kernel refuses it with this errno, to be appended to its error; may be empty.
const char* hint_for(BackendKind kind, int code);

}  // namespace dsx::aio
