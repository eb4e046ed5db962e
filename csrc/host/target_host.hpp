// The host target: kernels run on the calling thread, or in the simulation that this rank belongs
// to.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "device/arch/types.cuh"
#include "device/layout/names.cuh"
#include "host/interrupt.hpp"
#include "host/target.hpp"
#include "simt/machine.hpp"

namespace deep_comm {

class HostTarget {
 public:
  static constexpr bool kIsSynchronous = true;
  static constexpr bool kHasCopyEngines = false;
  static constexpr Tuning kTuning = {
      .layout_threads = 64,  // two warps, and blocks of few tokens: all that they share is tested
      .layout_tokens_per_block = 8,
      .min_notify_threads = 64,  // two warps and blocks: as few as have something to share
      .max_notify_threads = 64,
      .max_notify_blocks = 2,
      .num_reduce_warps = 2,
      .num_window_tokens = 6,
      .min_staged_senders = 2,
      .max_staged_senders = 2,
      .senders_of_twos = 2,
      .senders_of_few_twos = 2,
      .most_single_rows = 8,
      .min_senders = 2,
      .most_ring_senders = 64,
      .ring_window_bytes = 4 << 10,
      .num_ring_send_warps = 2,
      .ring_send_bytes = 1 << 16,
      .num_ring_receive_warps = 3,
      .most_ring_warps = 12,
      .good_piece_bytes = 2048,
      .num_direct_move_warps = 2,
      .num_link_sms = 1,
      .num_direct_cast_warps = 3,
      .num_direct_meta_warps = 1,
      .sender_smem_bytes = 43100,
      .low_latency_threads = 64,
      .internode_notify_threads = 64,
      .num_count_blocks = 2,
      .num_rail_sender_warps = 2,
      .num_tier_send_warps = 2,
      .num_tier_quantise_warps = 3,
      .num_lone_send_warps = 3,
      .num_lone_quantise_warps = 4,
      .num_tier_forward_warps = 2,
      .num_tier_meta_warps = 1,
      .number_threads = 64,
      .expand_rows_threads = 64,
      .expand_threads = 64,
      .reduce_experts_threads = 96,  // of sums inside a node two warps add, one publishes
      .num_collective_warps = 6,
      .most_push_warps = 4,
      .most_push_blocks = 2,
      .most_part_vecs = 3,
      .most_piece_vecs = 2,
      .most_local_blocks = 2,
      .add_slots_threads = 64};

  // simulation: not owned, may be null. device: the rank of the simulated machine to run
  // on, or -1: the same rank.
  HostTarget(int rank, int device, simt::Simulation* simulation)
      : rank_(device < 0 ? rank : device), simulation_(simulation) {}

  template <class KernelType>
  void prepare() {}

  template <class KernelType>
  void launch(const LaunchConfig& config, const typename KernelType::Args& args, uint64_t stream) {
    begin<KernelType>(config, args, stream);
    if (simulation_ != nullptr) simulation_->synchronize(rank_, stream);
  }
  // Outside of a simulation one after the other, as where there are no SMs for both.
  template <class First, class Second>
  void launch_pair(const LaunchConfig& first_config, const typename First::Args& first,
                   const LaunchConfig& second_config, const typename Second::Args& second,
                   uint64_t stream) {
    begin<First>(first_config, first, stream);
    begin<Second>(second_config, second, stream);
    if (simulation_ != nullptr) simulation_->synchronize(rank_, stream);
  }

  void* allocate_mapped(size_t num_bytes) {
    void* memory = std::calloc(1, num_bytes);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
  }
  static void free_mapped(void* memory) { std::free(memory); }
  void fill_zero(void* memory, size_t num_bytes) { std::memset(memory, 0, num_bytes); }
  template <class T>
  void store(T* word, T value) {
    *word = value;
  }
  void store_beside_kernels(uint32_t* word, uint32_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELAXED);
  }
  template <class T>
  T load_beside_kernels(const T* word) {
    return __atomic_load_n(word, __ATOMIC_RELAXED);
  }
  RailPort open_rail(RailPort port, int num_peers, uint64_t /*timeout_ns*/,
                     const RailOptions& options) {
    near_peers_ = std::make_shared<std::vector<RailPeer>>();
    for (int peer = 0; options.is_near && peer < num_peers; ++peer) {
      near_peers_->push_back({port.bases[peer], peer});
    }
    port.peers = near_peers_->empty() ? nullptr : near_peers_->data();
    return port;  // the executor carries out what is posted
  }
  void close_rail() { near_peers_.reset(); }
  void quiet_rail() {
    // Outside of a simulation what a grid has put lands before its launch returns.
    if (simulation_ != nullptr) simulation_->flush_rail(rank_);
  }
  std::vector<uint64_t> rail_put_bytes(const uint64_t* counters, size_t count) const {
    return {counters, counters + count};
  }
  bool is_idle(uint64_t /*stream*/) { return true; }
  int device() const { return rank_; }
  int smem_bytes_limit() const { return 227 * 1024; }  // as on sm_90
  bool can_begin_early() const { return true; }
  bool launches_block() const { return true; }

 private:
  template <class KernelType>
  void begin(const LaunchConfig& config, const typename KernelType::Args& args, uint64_t stream) {
    using Args = typename KernelType::Args;
    const simt::Grid grid{.kernel = name_of(KernelType::kName),
                          .rank = rank_,
                          .num_blocks = config.num_blocks,
                          .num_threads = config.num_threads,
                          .smem_bytes = config.smem_bytes,
                          .begin = kBeginsEarly<KernelType> ? simt::Begin::kEarly
                                   : config.may_begin_early ? simt::Begin::kBeside
                                                            : simt::Begin::kBehind};
    const simt::Body body = [](const void* raw) {
      KernelType::run(*static_cast<const Args*>(raw));
    };
    if (simulation_ != nullptr) {
      return simulation_->launch(rank_, stream, grid, body, &args, sizeof(Args));
    }
    InterruptWatch interrupts;
    simt::run(
        grid, body, &args, [](void* watch) { static_cast<InterruptWatch*>(watch)->look(); },
        &interrupts);
  }

  int rank_;
  simt::Simulation* simulation_;
  std::shared_ptr<std::vector<RailPeer>> near_peers_;  // that kernels reach by stores
};

}  // namespace deep_comm
