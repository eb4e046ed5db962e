#include "host/dispatch_record.hpp"

namespace deep_comm {

namespace {

Object part_of_block(const DispatchRecord& record, std::string_view name) {
  RoutingBlock::Names names;
  const int num_names = record.layout->named(&names);
  for (int i = 0; i < num_names; ++i) {
    const RoutingBlock::Named& part = names[i];
    if (part.name != name) continue;
    return record.block.make(*record.framework, record.block.base + part.offset, part.spec);
  }
  return {};
}

Object part_of_expansion(const DispatchRecord& record, std::string_view name) {
  const ExpansionRecord& expansion = *record.expansion;
  const auto numbered = [&](uintptr_t address, std::initializer_list<int64_t> shape) {
    if (address == 0) return Object();
    return expansion.numbering.make(*record.framework, address, TensorSpec::of(kInt32, shape));
  };
  const int64_t num_ranks = record.owner->num_ranks, num_local = expansion.num_local_experts;
  if (name == "expert_counts") return numbered(expansion.expert_counts, {num_local});
  if (name == "expert_offsets") return numbered(expansion.expert_offsets, {num_local + 1});
  if (name == "send_row") return numbered(expansion.send_row, {record.num_tokens, num_ranks});
  if (name == "num_expanded") return numbered(expansion.num_expanded, {num_ranks});
  if (name != "recv_rows") return {};
  const TensorSpec rows = TensorSpec::of(kInt32, {expansion.num_tokens_limit, expansion.num_topk});
  return expansion.placed.make(*record.framework, expansion.recv_rows, rows);
}

}  // namespace

Object PartMemory::make(Framework& framework, uintptr_t address, const TensorSpec& spec) const {
  if (is_viewed) return framework.part(tensor.get(), spec, address - base);
  // Views of several types could not be saved together.
  if (tensor) return framework.over(address, spec, std::make_shared<Object>(tensor));
  block->expose();
  return framework.over(address, spec, keeper);
}

Object DispatchRecord::part(std::string_view name) const {
  if (is_given()) return {};
  for (const RecordPart& part : parts) {
    if (part.name == name) return part.make(*framework);
  }
  Object made = expansion ? part_of_expansion(*this, name) : Object();
  return made ? made : part_of_block(*this, name);
}

}  // namespace deep_comm
