#include "host/calls/payload.hpp"

#include <algorithm>
#include <string>

namespace deep_comm {

namespace {

using Which = GivenProperty::Which;

std::string items(int num_items) { return std::to_string(num_items) + " items"; }

Payload check_cast(const CallContext& context, const PayloadRequest& request) {
  const TensorRef& x = request.x;
  if (request.num_items >= 0) {
    refuse_argument("x", items(request.num_items), "must be a tensor without scales with use_fp8");
  }
  require_tensor("x", x, {{-1, -1}, {kBfloat16}}, context.device_name);
  const int64_t hidden = x.shape[1];
  if (hidden == 0 || hidden % kScaleBlockColumns != 0) {
    refuse_argument("x", given_property(Which::kShape, x.object),
                    "must have a positive multiple of " + std::to_string(kScaleBlockColumns) +
                        " columns with use_fp8");
  }
  require_rows("x", x.shape[0], hidden * x.type.num_bytes);
  require_aligned("x", x);
  const ScaleOptions& options = request.scale_options;
  const int num_blocks = static_cast<int>(hidden / kScaleBlockColumns);
  Payload payload;
  payload.form = {.type = kFloat8E4m3,
                  .hidden = hidden,
                  .scale_type = options.use_ue8m0 ? kInt32 : kFloat32,
                  .num_scales = options.use_ue8m0 ? (num_blocks + 3) / 4 : num_blocks,
                  .is_quantised = true,
                  .scale_format = {options.round_scale, options.use_ue8m0}};
  payload.num_tokens = x.shape[0];
  payload.source = context.memory.non_null(x.address);
  payload.x_object = x.object;
  return payload;
}

Payload check_plain(const CallContext& context, const PayloadRequest& request) {
  const TensorRef& x = request.x;
  if (request.num_items >= 0 && request.num_items != 2) {
    refuse_argument("x", items(request.num_items), "must be a tensor or (tensor, scales)");
  }
  require_tensor("x", x, {{-1, -1}}, context.device_name);
  Payload payload;
  PayloadForm& form = payload.form;
  form.type = x.type;
  form.hidden = x.shape[1];
  payload.num_tokens = x.shape[0];
  require_rows("x", payload.num_tokens, form.hidden * x.type.num_bytes);
  require_aligned("x", x);
  payload.x = context.memory.non_null(x.address);
  payload.x_object = x.object;
  const TensorRef& scales = request.scales;
  if (!scales.is_given()) return payload;
  require_tensor("x_scales", scales, {{payload.num_tokens, -1}, {}, false}, context.device_name);
  const int num_bytes = scales.type.num_bytes;
  if (num_bytes != 1 && num_bytes != 2 && num_bytes != 4 && num_bytes != 8) {
    refuse_argument("x_scales", given_property(Which::kType, scales.object),
                    "must have elements of 1, 2, 4 or 8 bytes");
  }
  if (scales.shape[1] == 0) {
    refuse_argument("x_scales", given_property(Which::kShape, scales.object),
                    "must have at least one column");
  }
  form.scale_type = scales.type;
  form.num_scales = static_cast<int>(scales.shape[1]);
  payload.scales = context.memory.non_null(scales.address);
  payload.scale_token_stride = scales.strides[0];
  payload.scale_column_stride = scales.strides[1];
  payload.scales_object = scales.object;
  return payload;
}

}  // namespace

Payload check_payload(const CallContext& context, const PayloadRequest& request) {
  const ScaleOptions& options = request.scale_options;
  if (options.round_scale && !options.use_fp8) {
    refuse_argument("round_scale", true, "needs use_fp8");
  }
  if (options.use_ue8m0 && !(options.round_scale && options.use_fp8)) {
    refuse_argument("use_ue8m0", true, "needs use_fp8 and round_scale");
  }
  Payload payload = options.use_fp8 ? check_cast(context, request) : check_plain(context, request);
  payload.is_column_major = options.column_major;
  if (options.column_major && payload.form.scale_bytes() != 4) {
    refuse_argument("column_major_scales", true, "needs scales of 4 bytes");
  }
  return payload;
}

CastScratch allocate_scratch(CallContext& context, Payload& payload, CallOrder& order) {
  CastScratch scratch;
  const PayloadForm& form = payload.form;
  if (!form.is_quantised) return scratch;
  Memory& memory = context.memory;
  scratch.x = memory.empty(TensorSpec::of(form.type, {payload.num_tokens, form.hidden}), order);
  scratch.scales =
      memory.empty(TensorSpec::of(form.scale_type, {payload.num_tokens, form.num_scales}), order);
  payload.x = memory.non_null(scratch.x.address);
  payload.scales = memory.non_null(scratch.scales.address);
  payload.scale_token_stride = form.num_scales;
  payload.scale_column_stride = 1;
  return scratch;
}

Object transpose_scales(CallContext& context, const PayloadForm& form, uintptr_t address,
                        int64_t num_rows, int num_local_blocks, CallOrder& order) {
  constexpr int64_t kRows = 4;  // of 4 bytes: a column begins at a multiple of 16
  const int64_t stride = std::max<int64_t>(1, (num_rows + kRows - 1) / kRows) * kRows;
  MadeTensor columns =
      context.memory.empty(TensorSpec::of(form.scale_type, {form.num_scales * stride}), order);
  TransposeScalesArgs args{};
  args.src = reinterpret_cast<const uint32_t*>(address);
  args.dst = reinterpret_cast<uint32_t*>(context.memory.non_null(columns.address));
  args.num_rows = num_rows;
  args.num_columns = form.num_scales;
  args.column_stride = stride;
  context.launch([&] {
    context.engine.transpose_scales(args, {num_local_blocks, 1, 1}, order.stream());
  });
  return context.memory.framework().part(
      columns.tensor.get(),
      TensorSpec::strided(form.scale_type, {num_rows, form.num_scales}, {1, stride}), 0);
}

}  // namespace deep_comm
