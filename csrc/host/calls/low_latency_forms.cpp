// What calls of one shape with the same options have in common, worked out once.
#include <algorithm>

#include "host/calls/low_latency.hpp"
#include "host/ring_sizes.hpp"

namespace deep_comm {

namespace {

constexpr int kHostBlocks = 3;  // where no SMs limit them
constexpr int kBlockMultiple = 8;
constexpr int kScalesPerPack = 4;
constexpr int kFp4TileRows = 128;

bool is_same_form(const LowLatencyOptions& one, const LowLatencyOptions& other) {
  return one.num_max_tokens == other.num_max_tokens && one.hidden == other.hidden &&
         one.num_topk == other.num_topk && one.num_experts == other.num_experts &&
         one.format == other.format && one.round_scale == other.round_scale &&
         one.use_ue8m0 == other.use_ue8m0 && one.is_compact == other.is_compact &&
         one.has_weights == other.has_weights;
}

// [L, ...] or, compact, [...].
TensorSpec grouped(const LowLatencyForm& form, ElementType type,
                   std::initializer_list<int64_t> extents) {
  TensorSpec spec = TensorSpec::of(type, extents);
  if (form.options().is_compact) return spec;
  TensorSpec with_groups = spec;
  with_groups.num_dims = spec.num_dims + 1;
  with_groups.shape[0] = form.num_local_experts;
  with_groups.strides[0] = 1;
  for (int dim = 0; dim < spec.num_dims; ++dim) {
    with_groups.shape[dim + 1] = spec.shape[dim];
    with_groups.strides[dim + 1] = spec.strides[dim];
    with_groups.strides[0] *= std::max<int64_t>(spec.shape[dim], 1);
  }
  return with_groups;
}

// Of the matrices in it.
void store_by_column(TensorSpec* spec) {
  const int row = spec->num_dims - 2, column = spec->num_dims - 1;
  spec->strides[row] = 1;
  spec->strides[column] = std::max<int64_t>(spec->shape[row], 1);
}

std::vector<LowLatencyHandlePart> parts_of(const LowLatencyForm& form, int num_ranks) {
  const LowLatencyOptions& options = form.options();
  const LowLatencyMetadata& layout = form.plan.metadata;
  const int64_t max_tokens = options.num_max_tokens, num_topk = options.num_topk;
  std::vector<LowLatencyHandlePart> parts;
  const auto add = [&](const char* name, size_t offset, const TensorSpec& spec) {
    if (offset != LowLatencyMetadata::kNone) parts.push_back({name, spec, offset});
  };
  add("recv_count", layout.recv_count, TensorSpec::of(kInt32, {form.num_local_experts}));
  add("src_info", layout.src_info, grouped(form, kInt32, {form.num_rows}));
  add("layout_range", layout.layout_range, grouped(form, kInt64, {num_ranks}));
  add("recv_tokens", layout.recv_tokens, TensorSpec::of(kInt32, {num_ranks}));
  add("recv_rows", layout.recv_rows,
      options.is_compact ? TensorSpec::of(kInt32, {num_ranks, max_tokens})
                         : TensorSpec::of(kInt32, {num_ranks, max_tokens, num_topk}));
  add("recv_weights", layout.recv_weights,
      TensorSpec::of(kFloat32, {num_ranks, max_tokens, num_topk}));
  if (options.is_compact) add("num_recv_tokens", layout.num_recv, TensorSpec::of(kInt32, {1}));
  add("recv_topk_idx", layout.compact_idx, TensorSpec::of(kInt32, {form.num_rows, num_topk}));
  add("recv_topk_weights", layout.compact_weights,
      TensorSpec::of(kFloat32, {form.num_rows, num_topk}));
  return parts;
}

}  // namespace

int low_latency_available_blocks(int num_sms, std::optional<int> wanted) {
  if (wanted) return std::min(num_sms, *wanted);
  return std::max(num_sms - num_sms % kBlockMultiple, std::min(num_sms, kBlockMultiple));
}

const LowLatencyHandlePart* LowLatencyForm::find_part(std::string_view name) const {
  for (const LowLatencyHandlePart& part : parts) {
    if (part.name == name) return &part;
  }
  return nullptr;
}

Object LowLatencyDispatchRecord::part(std::string_view name) {
  const LowLatencyHandlePart* found = form->find_part(name);
  if (found == nullptr) return {};
  parts.resize(form->parts.size());
  Object& part = parts[found - form->parts.data()];
  if (!part) part = form->framework->part(metadata.tensor.get(), found->spec, found->offset);
  return part;
}

int LowLatencyCalls::checked_num_blocks(const LowLatencyOptions& options) const {
  const EngineCalls& engine = context_.engine;
  if (engine.low_latency_bytes() == 0) {
    refuse_argument("num_rdma_bytes", {},
                    "must be get_low_latency_rdma_size_hint(...) and low_latency_mode True, in the "
                    "Buffer's constructor, for low-latency calls");
  }
  const int most = engine.low_latency_max_experts(options.num_topk);
  if (options.num_experts > most) {
    refuse_argument("num_experts", static_cast<int64_t>(options.num_experts),
                    "must be at most " + std::to_string(most) + " in low-latency calls with top-" +
                        std::to_string(options.num_topk) + " and " +
                        std::to_string(context_.group.num_ranks) +
                        " ranks: a block counts them in its shared memory");
  }
  const int available = low_latency_available_blocks(context_.rings.max_sms.value_or(kHostBlocks),
                                                     settings_.num_wanted_blocks);
  // No more than there are pieces of work, and one: the last block counts, best without rows.
  const int64_t num_pieces =
      options.num_max_tokens * ceil_div<int64_t>(options.hidden, kColumnGroup);
  const int num_blocks =
      static_cast<int>(std::min<int64_t>({available, kMaxLowLatencyBlocks, num_pieces + 1}));
  LowLatencyOptions of_blocks = options;
  of_blocks.num_blocks = num_blocks;
  require_room(of_blocks, false);
  return num_blocks;
}

void LowLatencyCalls::require_room(const LowLatencyOptions& options, bool one_rounding) const {
  // Of what travels in combine, which NVFP4's rows are smaller than.
  const PayloadFormat format =
      options.format == PayloadFormat::kFp8 ? PayloadFormat::kFp8 : PayloadFormat::kBfloat16;
  const LowLatencyShape shape =
      low_latency_shape(options.num_max_tokens, options.hidden, options.num_topk,
                        options.num_experts, options.num_blocks, format);
  const GroupShape& group = context_.group;
  const size_t needed = low_latency_region_bytes(shape, group.num_ranks, one_rounding,
                                                 group.is_internode(), settings_.can_shrink);
  const size_t available = context_.engine.low_latency_bytes();
  if (needed <= available) return;
  refuse_memory("num_rdma_bytes", available, needed,
                std::to_string(options.num_max_tokens) + " tokens per rank of hidden size " +
                    std::to_string(options.hidden));
}

LowLatencyForm LowLatencyCalls::make_form(LowLatencyOptions options) const {
  options.num_blocks = checked_num_blocks(options);
  const int num_ranks = context_.group.num_ranks;
  LowLatencyForm form;
  form.plan = context_.engine.plan_low_latency(options);
  form.framework = settings_.framework;
  form.num_local_experts = context_.group.num_local_experts(options.num_experts);
  form.num_rows = int64_t{num_ranks} * options.num_max_tokens;
  form.rows = form.recv_x = grouped(form, kBfloat16, {form.num_rows, options.hidden});
  if (options.format == PayloadFormat::kFp8) {
    form.recv_x.type = kFloat8E4m3;
    const int64_t num_scales = options.hidden / kScaleBlockColumns;
    form.recv_scales =
        options.use_ue8m0
            ? grouped(form, kInt32, {form.num_rows, ceil_div<int64_t>(num_scales, kScalesPerPack)})
            : grouped(form, kFloat32, {form.num_rows, num_scales});
    store_by_column(&form.recv_scales);  // as grouped kernels take them
  } else if (options.format == PayloadFormat::kNvFp4) {
    form.recv_x = grouped(form, kUint8, {form.num_rows, options.hidden / 2});
    const int64_t num_tiles = ceil_div<int64_t>(form.num_rows, kFp4TileRows);
    form.recv_scales =
        grouped(form, kFloat8E4m3, {num_tiles, options.hidden / kFp4ScaleWord, 32, 4, 4});
  }
  form.metadata = TensorSpec::of(
      kInt32, {static_cast<int64_t>(form.plan.metadata.num_bytes / kInt32.num_bytes)});
  form.parts = parts_of(form, num_ranks);
  return form;
}

std::shared_ptr<const LowLatencyForm> LowLatencyCalls::form_of(const LowLatencyOptions& options) {
  for (const std::shared_ptr<const LowLatencyForm>& form : forms_) {
    if (is_same_form(form->options(), options)) return form;
  }
  forms_.push_back(std::make_shared<const LowLatencyForm>(make_form(options)));
  return forms_.back();
}

}  // namespace deep_comm
