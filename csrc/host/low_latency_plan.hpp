// Everything about a low-latency call that its shape and options decide, checked and worked out
// once: a call itself has a few microseconds of the host's time.
#pragma once

#include "device/layout/low_latency_metadata.cuh"
#include "device/low_latency/args.cuh"
#include "host/target.hpp"

namespace deep_comm {

struct LowLatencyOptions {
  int num_max_tokens;
  int hidden;
  int num_topk;
  int num_experts;
  int num_blocks;  // equal on all ranks
  PayloadFormat format;
  bool round_scale;
  bool use_ue8m0;
  bool is_compact;
  bool has_weights;  // they travel with dispatch
};

inline constexpr int kNumCombineRows = 3;
// Added to sums and reduced rows that travel in LogFMT.
inline constexpr int kLogFmtRows = kNumCombineRows;

struct LowLatencyPlan {
  LowLatencyOptions options;
  LowLatencyMetadata metadata;
  ExpertMap experts;
  LowLatencyShape dispatch_shape;
  LowLatencyShape combine_shape;
  LaunchConfig launch;
  uint32_t dispatch_signature;
  uint32_t combine_signatures[2 * kNumCombineRows];
  bool stages_strips;  // dispatch may send rows by bulk copies out of shared memory
  bool stages_rows;    // and whole ones: a thread has one piece of them
  bool has_room_for_selections;
  bool has_whole_log_pieces;
};

// Addresses of one call; 0: not given.
struct LowLatencyDispatchCall {
  uintptr_t x;
  uintptr_t topk_idx;
  int topk_idx_bytes;
  uintptr_t topk_weights;
  int num_tokens;
  uintptr_t recv_x;
  uintptr_t recv_scales;
  uintptr_t metadata;  // a block of plan.metadata.num_bytes
  uintptr_t cumulative_stats;
  uintptr_t wait_stats;
  bool send;
  bool receive;
  bool has_ticket;  // the one of the block
  bool is_reporting;
  bool has_global_idx;     // compact rows
  uintptr_t global_scale;  // NVFP4
};

struct LowLatencyCombineCall {
  uintptr_t x;
  uintptr_t metadata;  // of the dispatch
  uintptr_t topk_idx;
  int topk_idx_bytes;
  uintptr_t topk_weights;
  int num_tokens;
  CombineRows rows;
  bool use_logfmt;
  uintptr_t combined_x;
  uintptr_t wait_stats;
  bool send;
  bool receive;
  uintptr_t ticket;
};

}  // namespace deep_comm
