// What a launcher asks the current device.
#pragma once

#include <stdexcept>
#include <string>

#include "common/cuda/check.h"

namespace dsx::cuda {

struct Device {
  int processors = 0, major = 0, minor = 0;
  int shared_of_block = 0, shared_of_processor = 0;  // bytes, at most
  int shared_reserved = 0;                           // that each block takes besides

  // Throws if it is older than all the code of these kernels.
  explicit Device(const char* op) {
    int device = 0;
    check(cudaGetDevice(&device), op);
    const auto read = [&](int& value, cudaDeviceAttr attribute) {
      check(cudaDeviceGetAttribute(&value, attribute, device), op);
    };
    read(processors, cudaDevAttrMultiProcessorCount);
    read(major, cudaDevAttrComputeCapabilityMajor);
    read(minor, cudaDevAttrComputeCapabilityMinor);
    read(shared_of_block, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    read(shared_of_processor, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    read(shared_reserved, cudaDevAttrReservedSharedMemoryPerBlock);
    if (major >= 8) return;
    throw std::runtime_error(std::string(op) + ": the device has compute capability " +
                             std::to_string(major) + "." + std::to_string(minor) +
                             ", expected 8.0 or newer");
  }
};

}  // namespace dsx::cuda
