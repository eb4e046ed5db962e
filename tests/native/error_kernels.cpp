// Kernels that break a rule; each must end in the error that names it.
#include <stdexcept>

#include "test_kernel.hpp"

namespace deep_comm::test {
namespace {

using namespace deep_comm::arch;

void mask_without_caller(const Args&) {
  if (lane_idx() == 3) sync_warp(0x1u);
}
void different_masks(const Args&) { sync_warp(lane_idx() < 16 ? kFullMask : 0xfffffffeu); }
void different_operations(const Args&) {
  if (lane_idx() == 7) {
    ballot(kFullMask, true);
  } else {
    any(kFullMask, true);
  }
}
void mask_of_exited_lane(const Args&) {
  if (lane_idx() == 0) return;
  sync_block();
  sync_warp();
}
void exit_while_waited_for(const Args&) {
  if (lane_idx() < 31) sync_warp();
}
void barrier_counts(const Args&) { sync_named(1, warp_idx() == 0 ? 64 : 96); }
void barrier_of_roles(const Args&) {
  if (warp_idx() == 0) {
    sync_block();
  } else {
    sync_block();
  }
}
void roles_that_meet(const Args&) {
  if (warp_idx() == 0) {
    sync_block_apart();
  } else {
    sync_block_apart();
  }
  sync_block();
}
void barrier_id(const Args& args) { sync_named(static_cast<int>(args.params[0]), 32); }
void barrier_multiple(const Args&) { sync_named(2, 33); }
void barrier_never(const Args&) {
  if (warp_idx() == 0) sync_named(4, 64);
}
void collective_never(const Args&) {
  if (lane_idx() < 16) {
    sync_warp();
  } else {
    sync_block();
  }
}
void trapped(const Args&) {
  if (block_idx() == 1 && thread_idx() == 37) trap("a broken invariant");
}
void thrown(const Args&) {
  if (thread_idx() == 1) throw std::runtime_error("no kernel throws");
}
void smem_overrun(const Args& args) { dynamic_smem()[args.params[0]] = 1; }
void misaligned_store(const Args& args) {
  st_weak(reinterpret_cast<uint64_t*>(reinterpret_cast<uint8_t*>(args.memory) + 4), uint64_t{1});
}

int recurse(volatile int* depth) {  // NOLINT(misc-no-recursion): it is the point
  volatile uint8_t frame[1024];
  frame[0] = static_cast<uint8_t>(*depth);
  *depth = *depth + 1;
  if (*depth > 1000) return frame[0];
  return recurse(depth) + frame[0];
}
void stack_overflow(const Args& args) {
  volatile int depth = 0;
  args.memory[0] = static_cast<uint64_t>(recurse(&depth));
}
// Writes just past the low end of the stack, where a guard page would be.
void nearly_overflow(const Args& args) {
  volatile uint8_t locals[64 * 1024];
  for (volatile uint8_t& byte : locals) byte = 1;
  sync_block();
  args.memory[0] = locals[0];
}
// What vector instructions need of the stack.
void stack_alignment(const Args& args) {
  alignas(16) volatile uint8_t local[16];
  local[0] = 0;
  const auto frame = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
  args.memory[thread_idx()] =
      (reinterpret_cast<uintptr_t>(&local[0]) + frame) % 16 == 0 ? uint64_t{1} : uint64_t{2};
}
// 56 KiB of locals fit.
void deep_stack(const Args& args) {
  volatile uint8_t locals[56 * 1024];
  locals[0] = 1;
  sync_block();
  locals[sizeof locals - 1] = 2;
  args.memory[thread_idx()] = uint64_t{locals[0]} + locals[sizeof locals - 1];
}

constexpr Kernel kKernels[] = {
    kernel<mask_without_caller>("mask_without_caller"),
    kernel<different_masks>("different_masks"),
    kernel<different_operations>("different_operations"),
    kernel<mask_of_exited_lane>("mask_of_exited_lane"),
    kernel<exit_while_waited_for>("exit_while_waited_for"),
    kernel<barrier_counts>("barrier_counts"),
    kernel<barrier_of_roles>("barrier_of_roles"),
    kernel<roles_that_meet>("roles_that_meet"),
    kernel<barrier_id>("barrier_id"),
    kernel<barrier_multiple>("barrier_multiple"),
    kernel<barrier_never>("barrier_never"),
    kernel<collective_never>("collective_never"),
    kernel<trapped>("trapped"),
    kernel<thrown>("thrown"),
    kernel<smem_overrun>("smem_overrun"),
    kernel<misaligned_store>("misaligned_store"),
    kernel<stack_overflow>("stack_overflow"),
    kernel<stack_alignment>("stack_alignment"),
    kernel<nearly_overflow>("nearly_overflow"),
    kernel<deep_stack>("deep_stack"),
};

}  // namespace

std::span<const Kernel> error_kernels() { return kKernels; }

}  // namespace deep_comm::test
