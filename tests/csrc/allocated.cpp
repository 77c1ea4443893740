// A library to preload: counts the bytes that malloc and its kin have handed out, of all threads.
#include <malloc.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdlib>

extern "C" {

void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t count, size_t bytes);
void* __libc_realloc(void* address, size_t bytes);
void* __libc_memalign(size_t alignment, size_t bytes);
void __libc_free(void* address);

static std::atomic<long long> now{0}, most{0};

// What has been handed out and not been given back; the most of it since `begin`, which returns it.
long long dsx_allocated_begin() {
  most = now.load();
  return most;
}
long long dsx_allocated_most() { return most; }

static void* counted(void* address) {
  if (address == nullptr) return nullptr;
  const long long bytes = (long long)malloc_usable_size(address);
  const long long here = now.fetch_add(bytes) + bytes;
  long long before = most.load();
  while (before < here && !most.compare_exchange_weak(before, here)) {
  }
  return address;
}

static void forget(void* address) {
  if (address != nullptr) now.fetch_sub((long long)malloc_usable_size(address));
}

void* malloc(size_t bytes) { return counted(__libc_malloc(bytes)); }
void* calloc(size_t count, size_t bytes) { return counted(__libc_calloc(count, bytes)); }
void* memalign(size_t alignment, size_t bytes) {
  return counted(__libc_memalign(alignment, bytes));
}
void* aligned_alloc(size_t alignment, size_t bytes) { return memalign(alignment, bytes); }

int posix_memalign(void** address, size_t alignment, size_t bytes) {
  *address = memalign(alignment, bytes);
  return *address == nullptr ? ENOMEM : 0;
}

void* realloc(void* address, size_t bytes) {
  if (address == nullptr) return malloc(bytes);
  const long long before = (long long)malloc_usable_size(address);
  void* moved = __libc_realloc(address, bytes);
  if (moved == nullptr && bytes > 0) return nullptr;  // the old memory is as it was
  now.fetch_sub(before);
  return counted(moved);
}

void free(void* address) {
  forget(address);
  __libc_free(address);
}
}
