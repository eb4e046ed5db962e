// What a dispatch moves: rows with or without scales, as a caller gave them or cast to FP8 on their
// way.
#pragma once

#include "host/calls/call_context.hpp"
#include "host/calls/payload_form.hpp"

namespace deep_comm {

// x, or (x, scales).
struct PayloadRequest {
  TensorRef x;
  TensorRef scales;
  int num_items = -1;  // of a tuple or list; -1: x alone
  ScaleOptions scale_options;
};

// Address 0 means "absent"; an empty tensor has a non-null address.
struct Payload {
  PayloadForm form;
  int64_t num_tokens = 0;
  uintptr_t x = 0;
  uintptr_t scales = 0;
  int64_t scale_token_stride = 0, scale_column_stride = 0;
  uintptr_t source = 0;          // bfloat16 rows that are to be cast; x and scales are then scratch
  bool is_column_major = false;  // received scales are to be stored column by column
  // The caller's tensors, borrowed: they outlive the call.
  const void* x_object = nullptr;
  const void* scales_object = nullptr;
};

// Throws CallError: kArgument.
Payload check_payload(const CallContext& context, const PayloadRequest& request);

// Of a quantised payload: x and scales, which ring mode sends from. The tensors live until the call is
// launched: kernels of later calls that get their memory come after this call's.
struct CastScratch {
  MadeTensor x, scales;
};
CastScratch allocate_scratch(CallContext& context, Payload& payload, CallOrder& order);

// Its addresses in the arguments of either tier's dispatch kernel.
template <class Args>
void set_payload(const Payload& payload, Args* args) {
  args->num_tokens = static_cast<int>(payload.num_tokens);
  args->x = pointer_of<uint8_t>(payload.x);
  args->x_scales = pointer_of<uint8_t>(payload.scales);
  args->scale_token_stride = payload.scale_token_stride;
  args->scale_column_stride = payload.scale_column_stride;
  args->source = pointer_of<uint8_t>(payload.source);
}

// Received scales [num_rows, num_scales] at `address` once more, stored column by column, each column
// at a multiple of 16 bytes.
Object transpose_scales(CallContext& context, const PayloadForm& form, uintptr_t address,
                        int64_t num_rows, int num_local_blocks, CallOrder& order);

}  // namespace deep_comm
