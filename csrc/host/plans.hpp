// What calls of one form have in common, checked and worked out once: a call has a few
// microseconds of the host's time.
#pragma once

#include "device/intranode/args.cuh"
#include "host/target.hpp"

namespace deep_comm {

// Channels and rings of one call, as the user's Config asks for them.
struct ChannelConfig {
  int num_channels;
  int num_send_tokens;
  int num_slots;
};

// The rings between nodes of one call.
struct RailConfig {
  int num_send_tokens;  // rows of a put; without rings rounded up to a power of two
  int num_slots;
};

struct NotifyOptions {
  ChannelConfig channels;
  int dtypes;  // PayloadForm::dtypes
  int row_bytes;
  int scale_row_bytes;
  int cast;  // PayloadForm::cast
  int num_topk;
  int topk_idx_bytes;
  int num_experts;
  int expert_alignment;
  bool counts_choices;  // from topk_idx; else the layout is given
  bool is_expanded;
};

struct NotifyPlan {
  NotifyArgs args;  // all but addresses, tokens and place
  size_t smem_bytes;
};

struct DispatchOptions {
  ChannelConfig channels;
  int dtypes;  // PayloadForm::dtypes
  int row_bytes;
  int scale_bytes;
  int num_scales;
  int num_topk;
  int topk_idx_bytes;
  bool makes_handle;  // there is recv_src_idx
  bool is_expanded;
  bool is_quantised;
  ScaleFormat scale_format;
};

struct DispatchPlan {
  DispatchOptions options;
  // Without and with an output block in the receive region.
  struct Variant {
    DispatchArgs args;  // all but addresses, tokens and rows
    LaunchConfig launch;
  } variants[2];

  const Variant& variant(bool may_be_direct) const { return variants[may_be_direct ? 1 : 0]; }
};

// Combines that may run on more SMs than their handle has channels: see deep_comm/tuning.py.
struct CombineSms {
  int most_few_rows;  // that a rank returns, or tokens that it has; 0: never
  int of_few_rows;
  int of_more_sums;  // float32 rows, weights, biases; 0: never

  friend bool operator==(const CombineSms&, const CombineSms&) = default;
};

struct CombinePlan {
  Dtype dtype;
  CombineArgs args;  // all but addresses, tokens and rows
  LaunchConfig launch;
  CombineSms sms;
};

}  // namespace deep_comm
