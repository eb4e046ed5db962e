// Stacks that outlive a launch: a grid of some thousand fibers starts without a system call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace deep_comm::simt {

inline constexpr size_t kStackBytes = 64 * 1024;
inline constexpr uint64_t kStackCanary = 0x5afe57ac'c0ffee11u;

struct Stack {
  uint8_t* low = nullptr;  // kStackBytes from here
  // Below `low` lies a page that faults. Where the kernel allows no more of them (the number of
  // maps of a process is limited), a canary lies in the lowest words of the stack instead.
  bool guarded = false;

  uint64_t* canary() const { return guarded ? nullptr : reinterpret_cast<uint64_t*>(low); }
};

// One per process, because launches come from OS threads that may be short-lived.
class StackPool {
 public:
  static StackPool& instance();

  void acquire(size_t count, std::vector<Stack>& out);
  void release(std::vector<Stack>& stacks);  // empties the list
  // Tests only: what happens when the kernel refuses guard pages.
  void refuse_guard_pages(bool refuse);

 private:
  void grow();

  std::mutex mutex_;
  std::vector<Stack> free_;
  size_t num_guarded_ = 0;
  bool refuse_guard_pages_ = false;
};

}  // namespace deep_comm::simt
