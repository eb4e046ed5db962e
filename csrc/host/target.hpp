// What the engine asks of a target. Two classes offer it: HostTarget (SIMT executor) and
// CudaTarget.
//
//   static constexpr bool kIsSynchronous       a launch returns when the kernel has finished
//   static constexpr bool kHasCopyEngines      copy() moves bytes beside the kernels
//   static constexpr Tuning kTuning
//   template <class Kernel> void prepare()     makes the first launch as quick as the later ones
//   template <class Kernel> void launch(const LaunchConfig&, const typename Kernel::Args&,
//                                       uint64_t stream)
//   template <class First, class Second>
//   void launch_pair(const LaunchConfig&, const typename First::Args&, const LaunchConfig&,
//                    const typename Second::Args&, uint64_t stream)   Second: kBeginsBeside
//   void* allocate_mapped(size_t)              zeroed host memory, at the same address for kernels
//   static void free_mapped(void*)
//   void  fill_zero(void* heap_memory, size_t) when no kernel runs
//   void  store(T* heap_word, T value)         when no kernel runs
//   void  store_beside_kernels(uint32_t* heap_word, uint32_t value)   whatever runs
//   T     load_beside_kernels(const T* heap_word)                     likewise
//   RailPort open_rail(RailPort, int num_peers, uint64_t timeout_ns, const RailOptions&)
//                                              what its kernels need filled in; close_rail() ends it
//   void  quiet_rail()                         when no kernel runs: everything put has landed
//   std::vector<uint64_t> rail_put_bytes(const uint64_t* counters, size_t count)
//   int   device() const                       whose SMs the kernels share
//   int   smem_bytes_limit() const             shared memory that a block may have
//   bool  can_begin_early() const              kernels wait for the launch before theirs themselves
//   bool  launches_block() const               a launch of a rail kernel returns near its end
//   bool  is_idle(uint64_t stream)             nothing is left to run there; throws if the device
//                                              failed
#pragma once

#include <cstddef>
#include <cstdint>

namespace deep_comm {

struct LaunchConfig {
  int num_blocks;
  int num_threads;
  size_t smem_bytes;
  // May hold its SMs before the launch before it ends: see early_launches.hpp, and kBeginsBeside.
  bool may_begin_early = false;
};

// Of kernels that await the launch before theirs (arch::await_earlier_launch) before they touch
// memory.
template <class KernelType>
constexpr bool kBeginsEarly = requires {
  requires KernelType::kBeginsEarly;
};

// Of kernels that are the second of a pair: they run beside the first, and await its end before they
// end. They begin when all blocks of the first have begun and called arch::allow_later_launch. So
// they cannot keep it from its SMs, and may wait for what it does; it never waits for them.
template <class KernelType>
constexpr bool kBeginsBeside = requires {
  requires KernelType::kBeginsBeside;
};

// How wide kernels are on a target: GPUs want threads, the host wants few fibers.
struct Tuning {
  int layout_threads;
  int layout_tokens_per_block;  // at least, in at most max_notify_blocks
  int min_notify_threads;
  int max_notify_threads;
  int max_notify_blocks;
  int num_reduce_warps;  // combine: warps of a block that add rows
  // combine, staged, all blocks together: tokens that are looked for at a time; warps that send,
  // one a block between the two numbers
  int num_window_tokens;
  int min_staged_senders;
  int max_staged_senders;
  int senders_of_twos;      // where chunks have two rows and more, at most
  int senders_of_few_twos;  // the same, where there are words for chunks of one row, too
  int most_single_rows;     // combine: of a rank, beyond which they travel in twos
  int min_senders;          // combine: warps of a block that send, at least
  // ring combine: two warps fill each ring if a rank then has so many sending warps at most
  int most_ring_senders;
  // ring combine, where two do, which run ahead of the adding warps: slots of all rings of a rank
  int ring_window_bytes;
  int num_ring_send_warps;     // ring dispatch: of a block, for each rank that it sends to, at most
  int ring_send_bytes;         // rows that these have in work together, at most
  int num_ring_receive_warps;  // ring dispatch: of a block, for each peer, at most
  int most_ring_warps;         // ring dispatch: of a block, at most
  int good_piece_bytes;        // ring dispatch: has fewer warps rather than shorter pieces of rows
  int num_direct_move_warps;   // direct dispatch: at most
  int num_link_sms;            // direct dispatch: SMs whose rows to peers the links keep up with
  int num_direct_cast_warps;   // the same, of rows that are quantised on their way
  int num_direct_meta_warps;
  // Stages of one sending warp of combine, at most. Where direct mode is possible, ring dispatch has as
  // much for all of its warps as the senders of combine. What a block leaves is L1 for its readers.
  int sender_smem_bytes;
  int low_latency_threads;
  int internode_notify_threads;
  int num_count_blocks;       // two tiers: blocks that count a rank's tokens, at most
  int num_rail_sender_warps;  // two tiers, dispatch: warps of a channel that send to nodes, at most
  // two tiers, direct dispatch: warps of a block that send, forward, and, at most, write metadata
  int num_tier_send_warps;
  int num_tier_quantise_warps;  // that send, where they quantise
  int num_lone_send_warps;      // the same with one rank per node
  int num_lone_quantise_warps;
  int num_tier_forward_warps;  // one, with one rank per node
  int num_tier_meta_warps;
  int number_threads;  // number_rows
  int expand_rows_threads;
  int expand_threads;  // expand_received, transpose_scales
  int reduce_experts_threads;
  int num_collective_warps;  // of a block, after the first
  int most_push_warps;       // of them, where other blocks take what is pushed
  int most_push_blocks;      // and a quarter of all
  int most_part_vecs;        // of a shard, that a warp takes at a time
  int most_piece_vecs;       // of these, that it pushes at a time
  int most_local_blocks;     // of add_slots
  int add_slots_threads;
};

}  // namespace deep_comm
