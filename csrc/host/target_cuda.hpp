// The GPU target. `launch` is defined in engine_cuda.cu, the only file that nvcc compiles for it.
#pragma once

#include <memory>
#include <vector>

#include "host/memory_cuda.hpp"
#include "host/nvshmem_rail_cuda.hpp"
#include "host/software_nic_cuda.hpp"
#include "host/stream_cuda.hpp"
#include "host/target.hpp"

namespace deep_comm {

class CudaTarget {
 public:
  static constexpr bool kIsSynchronous = false;
  static constexpr bool kHasCopyEngines = true;
  static constexpr Tuning kTuning = {.layout_threads = 256,
                                     .layout_tokens_per_block = 256,
                                     .min_notify_threads = 256,
                                     .max_notify_threads = 1024,
                                     .max_notify_blocks = 132,
                                     .num_reduce_warps = 22,
                                     .num_window_tokens = 448,
                                     .min_staged_senders = 48,
                                     .max_staged_senders = 64,
                                     .senders_of_twos = 44,
                                     .senders_of_few_twos = 40,
                                     .most_single_rows = 800,
                                     .min_senders = 3,
                                     .most_ring_senders = 40,
                                     .ring_window_bytes = 16 << 20,
                                     .num_ring_send_warps = 4,
                                     .ring_send_bytes = 2 * 14336,
                                     .num_ring_receive_warps = 8,
                                     .most_ring_warps = 16,
                                     .good_piece_bytes = 2048,
                                     .num_direct_move_warps = 8,
                                     .num_link_sms = 7,
                                     .num_direct_cast_warps = 12,
                                     .num_direct_meta_warps = 4,
                                     .sender_smem_bytes = 43100,
                                     .low_latency_threads = 448,
                                     .internode_notify_threads = 256,
                                     .num_count_blocks = 64,
                                     .num_rail_sender_warps = 7,
                                     .num_tier_send_warps = 4,
                                     .num_tier_quantise_warps = 10,
                                     .num_lone_send_warps = 8,
                                     .num_lone_quantise_warps = 12,
                                     .num_tier_forward_warps = 3,
                                     .num_tier_meta_warps = 4,
                                     .number_threads = 512,
                                     .expand_rows_threads = 512,
                                     .expand_threads = 1024,
                                     .reduce_experts_threads = 640,
                                     .num_collective_warps = 15,
                                     .most_push_warps = 15,
                                     .most_push_blocks = 11,
                                     .most_part_vecs = 256,
                                     .most_piece_vecs = 256,
                                     .most_local_blocks = 528,
                                     .add_slots_threads = 512};

  CudaTarget(int /*rank*/, int device)
      : device_(device),
        smem_bytes_limit_(cuda_smem_bytes_limit(device)),
        can_begin_early_(has_early_launches(device)) {}

  template <class KernelType>
  void prepare();
  template <class KernelType>
  void launch(const LaunchConfig& config, const typename KernelType::Args& args, uint64_t stream);

  // Graphs keep the order, since captured launches of one stream keep theirs.
  template <class First, class Second>
  void launch_pair(const LaunchConfig& first_config, const typename First::Args& first,
                   const LaunchConfig& second_config, const typename Second::Args& second,
                   uint64_t stream) {
    launch<First>(first_config, first, stream);
    launch<Second>(second_config, second, stream);
  }

  void* allocate_mapped(size_t num_bytes);
  static void free_mapped(void* memory);
  void fill_zero(void* memory, size_t num_bytes);
  // In the stream's order, without an SM.
  void copy(void* to, const void* from, size_t num_bytes, uint64_t stream);
  template <class T>
  void store(T* word, T value) {
    copy_in(word, &value, sizeof(T));
  }
  void store_beside_kernels(uint32_t* word, uint32_t value) {
    copy_beside_kernels(word, &value, sizeof(value));
  }
  template <class T>
  T load_beside_kernels(const T* word) {
    T value{};
    copy_beside_kernels(&value, word, sizeof(T));
    return value;
  }
  RailPort open_rail(RailPort port, int num_peers, uint64_t timeout_ns, const RailOptions& options);
  void close_rail() {
    nic_.reset();
    over_nvshmem_.reset();
  }
  void quiet_rail() {
    if (nic_ != nullptr) nic_->quiet();
    if (over_nvshmem_ != nullptr) over_nvshmem_->kernels()->quiet();
  }
  std::vector<uint64_t> rail_put_bytes(const uint64_t* counters, size_t count) const;
  bool is_idle(uint64_t stream);
  int device() const { return device_; }
  int smem_bytes_limit() const { return smem_bytes_limit_; }
  bool can_begin_early() const { return can_begin_early_; }
  bool launches_block() const { return nic_ != nullptr; }

 private:
  static bool has_early_launches(int device);
  void copy_in(void* memory, const void* source, size_t num_bytes);
  void copy_beside_kernels(void* to, const void* from, size_t num_bytes);

  int device_;
  int smem_bytes_limit_;
  bool can_begin_early_;
  // Of a group of several nodes, one of them.
  std::shared_ptr<SoftwareNic> nic_;
  std::shared_ptr<NvshmemRailState> over_nvshmem_;
};

}  // namespace deep_comm
