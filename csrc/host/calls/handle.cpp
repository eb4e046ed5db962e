#include "host/calls/handle.hpp"

#include <algorithm>
#include <array>

#include "host/routing_block.hpp"

namespace deep_comm {

namespace {

constexpr char kAbsent[] = "without rank ";  // of members, see deep_comm/context/absent.py
constexpr char kSinceTheReset[] =
    "must be of a dispatch since the last reset(without=...), or reset() of all ranks";

struct Kind {
  ElementType type;
  int num_dims;
};
constexpr std::array kKindsInNode{Kind{kInt32, 2}, Kind{kInt32, 2}, Kind{kInt32, 2},
                                  Kind{kInt32, 1}, Kind{kBool, 2},  Kind{kInt32, 2}};
constexpr std::array kKindsBetweenNodes{
    Kind{kBool, 2},  Kind{kInt32, 2}, Kind{kInt32, 2}, Kind{kInt32, 2}, Kind{kInt32, 1},
    Kind{kInt32, 2}, Kind{kInt32, 1}, Kind{kUint8, 2}, Kind{kInt32, 2}, Kind{kInt32, 2}};
// What these tensors are of a routing block; kNumParts: of none.
constexpr std::array kPartsInNode{RoutingPart::kRankPrefix,        RoutingPart::kChannelPrefix,
                                  RoutingPart::kRecvChannelPrefix, RoutingPart::kNumParts,
                                  RoutingPart::kTokenMask,         RoutingPart::kSendHead};
constexpr std::array kPartsBetweenNodes{
    RoutingPart::kTokenMask,      RoutingPart::kNodePrefix,  RoutingPart::kChannelPrefix,
    RoutingPart::kRecvNodePrefix, RoutingPart::kRecvNodeSum, RoutingPart::kRecvChannelPrefix,
    RoutingPart::kRecvRankSum,    RoutingPart::kNumParts,    RoutingPart::kSendNodeHead,
    RoutingPart::kNumParts};

bool is_of(const TensorRef& given, const Kind& kind) {
  return given.kind == TensorRef::Kind::kTensor && given.type == kind.type &&
         given.num_dims == kind.num_dims && given.is_contiguous();
}

template <size_t kCount>
void require_kinds(const GivenHandle& given, const std::array<Kind, kCount>& kinds,
                   const char* made_by) {
  if (given.num_items != static_cast<int>(kCount)) {
    std::string value = given.type_name;
    if (given.num_items >= 0) value += " of " + std::to_string(given.num_items) + " items";
    const char* hint = given.num_items >= 0            ? ""
                       : given.type_name == "Tensor"   ? " (pass topk_idx by name)"
                       : given.type_name == "NoneType" ? " (a dispatch with a handle returns none: "
                                                         "use the handle that it was given)"
                                                       : "";
    refuse_argument("handle", std::move(value),
                    std::string("must be what ") + made_by + " returned" + hint);
  }
  for (size_t position = 0; position < kCount; ++position) {
    const Kind& kind = kinds[position];
    if (is_of(given.tensors[position], kind)) continue;
    const char* type = kind.type == kBool    ? "torch.bool"
                       : kind.type == kUint8 ? "torch.uint8"
                                             : "torch.int32";
    refuse_argument(
        "handle[" + std::to_string(position) + "]",
        given_property(GivenProperty::Which::kTypeName, given.tensors[position].object),
        "must be a contiguous " + std::to_string(kind.num_dims) + "-D tensor of " + type);
  }
}

void require_group(const CallContext& context, int64_t num_ranks, int64_t num_nodes) {
  const GroupShape& group = context.group;
  if (num_ranks == group.num_ranks && num_nodes == group.num_nodes) return;
  const auto ranks = [&](int64_t ranks, int64_t nodes) {
    std::string text = std::to_string(ranks) + " ranks";
    return group.is_internode() ? text + " on " + std::to_string(nodes) + " nodes" : text;
  };
  refuse_handle(ranks(num_ranks, num_nodes),
                "must be of this group of " + ranks(group.num_ranks, group.num_nodes));
}

// The same ranks, but not the same ones absent.
bool differ_in_absence(const std::vector<std::string>& first,
                       const std::vector<std::string>& second) {
  const auto is_absent = [](const std::string& name) { return name.rfind(kAbsent, 0) == 0; };
  bool has_difference = false;
  const auto lacks_others = [&](const auto& some, const auto& others) {
    return std::all_of(some.begin(), some.end(), [&](const std::string& name) {
      if (std::find(others.begin(), others.end(), name) != others.end()) return true;
      has_difference = true;
      return is_absent(name);
    });
  };
  return lacks_others(first, second) && lacks_others(second, first) && has_difference;
}

void require_rank(const CallContext& context, int64_t rank) {
  if (rank == context.group.rank) return;
  refuse_handle("rank " + std::to_string(rank),
                "must be of this rank (" + std::to_string(context.group.rank) + ")");
}

void require_members(const CallContext& context, const std::vector<std::string>& members) {
  const std::vector<std::string>& own = context.token->members;
  if (members == own) return;
  if (differ_in_absence(members, own)) {
    refuse_handle("one of a dispatch with other ranks absent", kSinceTheReset);
  }
  refuse_handle("one of other ranks", "must be of this Buffer's group");
}

void require_device(const CallContext& context, const TensorRef& tensor) {
  if (tensor.is_on_device) return;
  refuse_handle(given_property(GivenProperty::Which::kDevice, tensor.object),
                "must be on " + context.device_name);
}

void require_part(const CallContext& context, const char* name, const TensorRef& tensor,
                  const RoutingBlock& made, RoutingPart part) {
  const TensorSpec& spec = made.at(part).spec;
  if (spec.num_dims == 1) {
    require_tensor(name, tensor, {{spec.shape[0]}, {spec.type}}, context.device_name);
  } else {
    require_tensor(name, tensor, {{spec.shape[0], spec.shape[1]}, {spec.type}},
                   context.device_name);
  }
}

// Kernels read as much as a dispatch would have made. Behind require_kinds and require_group.
void require_extents(const CallContext& context, const GivenHandle& given) {
  using enum RoutingPart;
  const GroupShape& group = context.group;
  const std::vector<TensorRef>& tensors = given.tensors;
  const int64_t num_channels = tensors[1].shape[1];
  const auto require = [&](const RoutingBlock& made, const auto& parts) {
    for (size_t position = 0; position < parts.size(); ++position) {
      if (parts[position] == kNumParts) continue;
      const std::string name = "handle[" + std::to_string(position) + "]";
      require_part(context, name.c_str(), tensors[position], made, parts[position]);
    }
  };
  if (!group.is_internode()) {
    return require(
        RoutingBlock::in_node(group.num_ranks, num_channels, 0, tensors[4].shape[0], true),
        kPartsInNode);
  }
  const RoutingBlock made = RoutingBlock::between_nodes(
      group.num_nodes, group.num_ranks, num_channels, 0, 0, tensors[0].shape[0], true, true);
  require(made, kPartsBetweenNodes);
  require_tensor("handle[7]", tensors[7], {{-1, 8}}, context.device_name);
  require_tensor("handle[9]", tensors[9], {{-1, group.num_ranks / group.num_nodes}},
                 context.device_name);
  if (given.send_slots.is_given()) {
    require_part(context, "handle.send_slots", given.send_slots, made, kSendSlots);
  }
  if (given.forward_slots.is_given()) {
    require_part(context, "handle.forward_slots", given.forward_slots, made, kForwardSlots);
  }
}

void require_expansion(const CallContext& context, const GivenHandle& given) {
  const GivenHandle::Expansion& expansion = *given.expansion;
  const GroupShape& group = context.group;
  const auto require = [&](const char* name, const TensorRef& tensor,
                           std::initializer_list<int64_t> shape) {
    require_tensor(name, tensor, {shape, {kInt32}}, context.device_name);
  };
  require("handle.expansion.recv_rows", expansion.recv_rows, {-1, -1});
  const TensorRef& counts = expansion.expert_counts;
  require("handle.expansion.expert_counts", counts,
          {given.num_experts != 0 ? group.num_local_experts(given.num_experts) : -1});
  require("handle.expansion.expert_offsets", expansion.expert_offsets, {counts.shape[0] + 1});
  if (group.is_internode()) return;
  require("handle.expansion.send_row", expansion.send_row,
          {given.tensors[4].shape[0], group.num_ranks});
  require("handle.expansion.num_expanded", expansion.num_expanded, {group.num_ranks});
}

ExpansionRecord expansion_of(const Memory& memory, const GivenHandle::Expansion& given) {
  ExpansionRecord expansion;
  expansion.send_row = memory.address_of(given.send_row);
  expansion.num_expanded = memory.address_of(given.num_expanded);
  expansion.recv_rows = memory.address_of(given.recv_rows);
  expansion.expert_offsets = memory.address_of(given.expert_offsets);
  expansion.expert_counts = memory.address_of(given.expert_counts);
  expansion.num_tokens_limit = given.recv_rows.shape[0];
  expansion.num_topk = static_cast<int>(given.recv_rows.shape[1]);
  expansion.num_local_experts = static_cast<int>(given.expert_counts.shape[0]);
  expansion.num_rows = given.num_rows;
  expansion.expert_alignment = given.expert_alignment;
  return expansion;
}

void fill_in_node(const Memory& memory, const std::vector<TensorRef>& tensors,
                  DispatchRecord* record) {
  RoutingAddresses& routing = record->routing;
  routing.rank_prefix = memory.address_of(tensors[0]);
  routing.channel_prefix = memory.address_of(tensors[1]);
  routing.recv_channel_prefix = memory.address_of(tensors[2]);
  routing.is_token_in_rank = memory.address_of(tensors[4]);
  routing.send_head = memory.address_of(tensors[5]);
  record->num_channels = static_cast<int>(tensors[1].shape[1]);
  record->num_recv_rows = tensors[3].shape[0];
  record->num_tokens = tensors[4].shape[0];
}

void fill_between_nodes(const Memory& memory, const GivenHandle& given, DispatchRecord* record) {
  const std::vector<TensorRef>& tensors = given.tensors;
  RoutingAddresses& routing = record->routing;
  routing.is_token_in_rank = memory.address_of(tensors[0]);
  routing.node_prefix = memory.address_of(tensors[1]);
  routing.channel_prefix = memory.address_of(tensors[2]);
  routing.recv_node_prefix = memory.address_of(tensors[3]);
  routing.recv_node_sum = memory.address_of(tensors[4]);
  routing.recv_channel_prefix = memory.address_of(tensors[5]);
  routing.recv_rank_sum = memory.address_of(tensors[6]);
  routing.recv_src_meta = memory.address_of(tensors[7]);
  routing.send_node_head = memory.address_of(tensors[8]);
  routing.send_rank_head = memory.address_of(tensors[9]);
  routing.send_slots = memory.address_of(given.send_slots);
  routing.forward_slots = memory.address_of(given.forward_slots);
  record->num_tokens = tensors[0].shape[0];
  record->num_channels = static_cast<int>(tensors[1].shape[1]);
  record->num_recv_rows = tensors[7].shape[0];
  record->num_forward_rows = tensors[9].shape[0];
  record->num_returning_rows = given.num_returning_rows;
}

}  // namespace

std::shared_ptr<DispatchRecord> record_of(const CallContext& context, const GivenHandle& given) {
  const bool is_internode = context.group.is_internode();
  const std::vector<TensorRef>& tensors = given.tensors;
  if (is_internode) {
    require_kinds(given, kKindsBetweenNodes, "dispatch between nodes");
    require_group(context, tensors[0].shape[1], tensors[1].shape[0]);
  } else {
    require_kinds(given, kKindsInNode, "dispatch");
    require_group(context, tensors[0].shape[0], 1);
  }
  if (given.rank) require_rank(context, *given.rank);
  if (given.members) require_members(context, *given.members);
  for (const TensorRef& tensor : tensors) require_device(context, tensor);
  require_extents(context, given);
  if (given.expansion) require_expansion(context, given);

  auto record = std::make_shared<DispatchRecord>();
  record->owner = context.token;
  record->rank = context.group.rank;
  record->num_experts = given.num_experts;
  record->num_topk = given.num_topk;
  record->has_default_sms = given.has_default_sms;
  const Memory& memory = context.memory;
  if (is_internode) {
    fill_between_nodes(memory, given, record.get());
  } else {
    fill_in_node(memory, tensors, record.get());
  }
  record->num_output_rows = record->num_recv_rows;
  if (given.expansion) {
    record->expansion = expansion_of(memory, *given.expansion);
    record->num_output_rows = given.expansion->num_rows;
  }
  const auto hold = [&](const TensorRef& tensor) {
    if (tensor.is_given()) record->held.tensors.push_back(Object::borrow(tensor.object));
  };
  for (const TensorRef& tensor : tensors) hold(tensor);
  hold(given.send_slots);
  hold(given.forward_slots);
  if (given.expansion) {
    const GivenHandle::Expansion& rows = *given.expansion;
    for (const TensorRef& tensor : {rows.expert_offsets, rows.expert_counts, rows.recv_rows,
                                    rows.send_row, rows.num_expanded}) {
      hold(tensor);
    }
  }
  record->held.owner_stream = given.owner_stream;
  return record;
}

void require_same_group(const CallContext& context, int rank, const BufferToken& maker) {
  require_group(context, maker.num_ranks, maker.num_nodes);
  require_rank(context, rank);
  require_members(context, maker.members);
  if (maker.device_name != context.device_name) {
    refuse_handle(maker.device_name, "must be on " + context.device_name);
  }
}

std::shared_ptr<DispatchRecord> check_handle(const CallContext& context,
                                             const HandleRequest& request) {
  std::shared_ptr<DispatchRecord> record = request.record ? request.record : request.read();
  if (record->owner != context.token) require_same_group(context, record->rank, *record->owner);
  return record;
}

}  // namespace deep_comm
