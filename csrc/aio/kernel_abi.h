// What the kernel promises never to change, of io_uring, Linux aio and statx: own copies, because
// the headers of older distributions lack some of it. Names are the kernel's without its prefixes.
#pragma once

#include <sys/syscall.h>

#include <cstddef>
#include <cstdint>

namespace dsx::aio::abi {

// io_uring: these numbers are the same on every architecture

inline constexpr long sys_io_uring_setup = 425;
inline constexpr long sys_io_uring_enter = 426;
inline constexpr long sys_io_uring_register = 427;

inline constexpr uint32_t setup_submit_all = 1u << 7;  // 5.18: a refused entry does not end a batch
inline constexpr uint32_t setup_coop_taskrun = 1u << 8;   // 5.19: no interrupt for a completion
inline constexpr uint32_t feature_single_mmap = 1u << 0;  // 5.4
inline constexpr uint32_t feature_nodrop = 1u << 1;       // 5.5: completions wait for room
inline constexpr uint32_t enter_getevents = 1u << 0;
inline constexpr uint32_t register_unregister_buffers = 1;
inline constexpr uint32_t register_probe = 8;
inline constexpr uint32_t register_buffers2 = 15;        // 5.13
inline constexpr uint32_t register_buffers_update = 16;  // 5.13
inline constexpr uint16_t probe_supported = 1u << 0;
inline constexpr uint64_t offset_rings = 0;           // of mmap
inline constexpr uint64_t offset_sqes = 0x1000'0000;  // of mmap

enum Opcode : uint8_t {
  op_read_fixed = 4,
  op_write_fixed = 5,
  op_poll_add = 6,
  op_read = 22,
  op_write = 23,
};

struct SqOffsets {
  uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, reserved;
  uint64_t user_address;
};
static_assert(sizeof(SqOffsets) == 40);

struct CqOffsets {
  uint32_t head, tail, ring_mask, ring_entries, overflow, cqes, flags, reserved;
  uint64_t user_address;
};
static_assert(sizeof(CqOffsets) == 40);

struct UringParams {
  uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd;
  uint32_t reserved[3];
  SqOffsets sq;
  CqOffsets cq;
};
static_assert(sizeof(UringParams) == 120);

struct Sqe {
  uint8_t opcode;
  uint8_t flags;
  uint16_t priority;
  int32_t fd;
  uint64_t offset;
  uint64_t address;
  uint32_t length;
  uint32_t op_flags;  // events of a poll
  uint64_t user_data;
  uint16_t buffer_index;
  uint16_t personality;
  int32_t file_index;
  uint64_t reserved[2];
};
static_assert(sizeof(Sqe) == 64);
static_assert(offsetof(Sqe, user_data) == 32 && offsetof(Sqe, buffer_index) == 40);

struct Cqe {
  uint64_t user_data;
  int32_t result;
  uint32_t flags;
};
static_assert(sizeof(Cqe) == 16);

struct ResourceRegister {
  uint32_t count;
  uint32_t flags;
  uint64_t reserved;
  uint64_t data;
  uint64_t tags;
};
static_assert(sizeof(ResourceRegister) == 32);

struct ResourceUpdate {
  uint32_t offset;
  uint32_t reserved;
  uint64_t data;
  uint64_t tags;
  uint32_t count;
  uint32_t reserved2;
};
static_assert(sizeof(ResourceUpdate) == 32);

struct ProbeOp {
  uint8_t opcode;
  uint8_t reserved;
  uint16_t flags;
  uint32_t reserved2;
};
static_assert(sizeof(ProbeOp) == 8);

inline constexpr uint32_t probe_ops = 256;

struct Probe {
  uint8_t last_opcode;
  uint8_t length;
  uint16_t reserved;
  uint32_t reserved2[3];
  ProbeOp ops[probe_ops];
};
static_assert(sizeof(Probe) == 16 + 8 * probe_ops);

// Linux aio: the rest is in linux/aio_abi.h

inline constexpr uint16_t iocb_cmd_poll = 5;  // 4.18

}  // namespace dsx::aio::abi

namespace dsx::aio {

// statx, with the alignment that direct I/O needs, for SYS_statx

inline constexpr uint32_t statx_dio_align =
    0x2000;  // 6.1; in a mask, also in the one that comes back

struct KernelStatx {
  uint32_t stx_mask;  // what the kernel filled in
  uint32_t stx_blksize;
  uint64_t stx_attributes;
  uint32_t stx_nlink, stx_uid, stx_gid;
  uint16_t stx_mode;
  uint16_t reserved;
  uint64_t stx_ino, stx_size, stx_blocks, stx_attributes_mask;
  struct Time {
    int64_t seconds;
    uint32_t nanoseconds;
    int32_t reserved;
  } stx_atime, stx_btime, stx_ctime, stx_mtime;
  uint32_t stx_rdev_major, stx_rdev_minor, stx_dev_major, stx_dev_minor;
  uint64_t stx_mnt_id;
  uint32_t stx_dio_mem_align;     // 0: no direct I/O on this file
  uint32_t stx_dio_offset_align;  // 0: no direct I/O on this file
  uint64_t reserved2[12];
};
static_assert(sizeof(KernelStatx) == 256 && sizeof(KernelStatx::Time) == 16);
static_assert(offsetof(KernelStatx, stx_mode) == 28 && offsetof(KernelStatx, stx_size) == 40);
static_assert(offsetof(KernelStatx, stx_mtime) == 112 && offsetof(KernelStatx, stx_mnt_id) == 144);
static_assert(offsetof(KernelStatx, stx_dio_mem_align) == 152);

}  // namespace dsx::aio
