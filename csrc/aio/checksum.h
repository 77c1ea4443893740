// CRC-32C (Castagnoli, RFC 3720): the checksum of what lies on disk, by the CPU's own instruction
// where it has one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dsx::aio {

// The checksum of bytes that may lie anywhere. `seed` is the checksum of what comes before them:
// crc32c(b, n, crc32c(a, m)) is that of a followed by b.
uint32_t crc32c(const void* data, size_t bytes, uint32_t seed = 0);

// The two ways to the same value, for tests. The second needs has_crc32c_instruction().
uint32_t crc32c_by_tables(const void* data, size_t bytes, uint32_t seed = 0);
uint32_t crc32c_by_instruction(const void* data, size_t bytes, uint32_t seed = 0);
bool has_crc32c_instruction();

}  // namespace dsx::aio
