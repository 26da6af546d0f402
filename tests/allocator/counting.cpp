// Counts the bytes of every aligned allocation of a process: what torch's CPU allocator takes, and what libraries inside
// its kernels take the same way. Loaded with LD_PRELOAD; read through counted_now() and counted_peak().
//
// Only posix_memalign and aligned_alloc are counted: Python's own objects come from malloc and would be noise.
#include <errno.h>
#include <stdlib.h>

#include <mutex>
#include <unordered_map>

// glibc's own entries, under names that nothing replaces: looking the next ones up by name would allocate.
extern "C" void* __libc_memalign(size_t alignment, size_t size);
extern "C" void __libc_free(void* block);

namespace {
std::mutex guard;
long long now = 0, peak = 0;
// Set while the table is worked on: its own nodes are freed through free() too.
thread_local bool inside = false;
struct Inside {
  Inside() { inside = true; }
  ~Inside() { inside = false; }
};

std::unordered_map<void*, size_t>& sizes() {
  // Never destroyed: memory is freed until the very end of the process.
  static auto* table = new std::unordered_map<void*, size_t>();
  return *table;
}

void add(void* block, size_t size) {
  if (block == nullptr) return;
  Inside here;
  std::lock_guard<std::mutex> lock(guard);
  sizes()[block] = size;
  now += static_cast<long long>(size);
  if (now > peak) peak = now;
}
}  // namespace

extern "C" {
int posix_memalign(void** block, size_t alignment, size_t size) {
  void* found = __libc_memalign(alignment, size);
  if (found == nullptr) return ENOMEM;
  add(found, size);
  *block = found;
  return 0;
}

void* aligned_alloc(size_t alignment, size_t size) {
  void* block = __libc_memalign(alignment, size);
  add(block, size);
  return block;
}

void free(void* block) {
  if (block != nullptr && !inside) {
    Inside here;
    std::lock_guard<std::mutex> lock(guard);
    auto found = sizes().find(block);
    if (found != sizes().end()) {
      now -= static_cast<long long>(found->second);
      sizes().erase(found);
    }
  }
  __libc_free(block);
}

long long counted_now() {
  std::lock_guard<std::mutex> lock(guard);
  return now;
}

// The most that was alive at once since the last call, which starts the next count.
long long counted_peak() {
  std::lock_guard<std::mutex> lock(guard);
  long long most = peak;
  peak = now;
  return most;
}
}
