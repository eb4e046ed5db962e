// The handle of a call: a dispatch's record, or tensors that become one once they are checked.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "host/calls/call_context.hpp"

namespace deep_comm {

struct HandleRequest {
  bool is_given = false;
  // Of a dispatch, or of tensors that calls of this Buffer have taken before.
  std::shared_ptr<DispatchRecord> record;
  // Without a record: reads what was given, see record_of. Throws CallError.
  std::function<std::shared_ptr<DispatchRecord>()> read;
};

// A handle that was given as tensors: a sequence of them, or a Handle of them that says more.
struct GivenHandle {
  struct Expansion {
    TensorRef expert_offsets, expert_counts, recv_rows;
    TensorRef send_row, num_expanded;  // between nodes absent
    int64_t num_rows = 0;
    int expert_alignment = 1;
  };

  std::string type_name;
  int num_items = -1;              // of a tuple or list; -1: it is none, nor a Handle
  std::vector<TensorRef> tensors;  // of such a sequence, or of a Handle
  // Of a Handle; of a sequence not known.
  std::optional<int64_t> rank;
  std::optional<std::vector<std::string>> members;
  int num_experts = 0, num_topk = 0;
  bool has_default_sms = false;
  std::optional<uint64_t> owner_stream;
  std::optional<Expansion> expansion;
  TensorRef send_slots, forward_slots;  // between nodes
  std::optional<int64_t> num_returning_rows;
};

// Checks what was given, of the tier of the Buffer. Throws CallError: kArgument, kHandleMismatch.
std::shared_ptr<DispatchRecord> record_of(const CallContext& context, const GivenHandle& given);

// A handle of another Buffer: its maker was this rank of the same group, with the same ranks absent.
// Throws CallError kHandleMismatch.
void require_same_group(const CallContext& context, int rank, const BufferToken& maker);

// The record of a call's handle. Throws CallError: the same.
std::shared_ptr<DispatchRecord> check_handle(const CallContext& context,
                                             const HandleRequest& request);

}  // namespace deep_comm
