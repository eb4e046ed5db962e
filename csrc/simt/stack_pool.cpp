#include "stack_pool.hpp"

#include <sys/mman.h>

#include <new>

namespace deep_comm::simt {
namespace {

constexpr size_t kPageBytes = 4096;
constexpr size_t kStacksPerChunk = 64;
// A guarded stack takes two of the 65 530 maps that Linux allows a process by default,
// and once those are gone every mmap of the process fails, not only ours. Stacks beyond
// this number have canaries.
constexpr size_t kMaxGuardedStacks = 8192;

size_t guard_bytes() {
  // Pages of 16 or 64 KiB exist (aarch64): a guard is at least one page of the largest size there.
#if defined(__x86_64__)
  return kPageBytes;
#else
  return 65536;
#endif
}

}  // namespace

StackPool& StackPool::instance() {
  static StackPool* pool = new StackPool;  // never destroyed: fibers of other threads may still end
  return *pool;
}

void StackPool::refuse_guard_pages(bool refuse) {
  std::lock_guard lock(mutex_);
  refuse_guard_pages_ = refuse;
}

void StackPool::grow() {
  // The guard between two stacks also gives them a stride that is no power of two: the hot ends of
  // the stacks of one block then spread over the sets of the caches.
  const size_t stride = kStackBytes + guard_bytes();
  void* chunk = mmap(nullptr, stride * kStacksPerChunk, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (chunk == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_NOHUGEPAGE
  madvise(chunk, stride * kStacksPerChunk, MADV_NOHUGEPAGE);
#endif
  for (size_t i = 0; i < kStacksPerChunk; ++i) {
    uint8_t* slot = static_cast<uint8_t*>(chunk) + i * stride;
    const bool guarded = !refuse_guard_pages_ && num_guarded_ < kMaxGuardedStacks &&
                         mprotect(slot, guard_bytes(), PROT_NONE) == 0;
    num_guarded_ += guarded;
    free_.push_back(Stack{.low = slot + guard_bytes(), .guarded = guarded});
  }
}

void StackPool::acquire(size_t count, std::vector<Stack>& out) {
  std::lock_guard lock(mutex_);
  if (refuse_guard_pages_) free_.clear();
  while (free_.size() < count) grow();
  out.assign(free_.end() - static_cast<ptrdiff_t>(count), free_.end());
  free_.resize(free_.size() - count);
}

void StackPool::release(std::vector<Stack>& stacks) {
  std::lock_guard lock(mutex_);
  if (!refuse_guard_pages_) free_.insert(free_.end(), stacks.begin(), stacks.end());
  stacks.clear();
}

}  // namespace deep_comm::simt
