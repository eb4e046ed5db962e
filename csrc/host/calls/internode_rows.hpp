// Memory for what a dispatch between nodes receives: in the receive region while there is room, where
// neighbours write it in place; else the framework's, which the rings fill.
#pragma once

#include <optional>

#include "host/calls/dispatch.hpp"
#include "host/calls/dispatch_outputs.hpp"

namespace deep_comm {

// Q received rows, F forwarded ones: tokens that ranks of this local index send to this node.
class TierRows {
 public:
  // Empty: the region has no room. is_scratch: only kernels see the rows.
  static std::optional<TierRows> in_region(CallContext& context, const OutputForm& form,
                                           bool is_scratch, int64_t num_rows,
                                           int64_t num_forward_rows, const CallOrder& order);
  static TierRows allocate(CallContext& context, const OutputForm& form, bool is_scratch,
                           int64_t num_rows, int64_t num_forward_rows, CallOrder& order);
  // Of rows in the region: so many have come, no more than there is room for, and lie there as if it
  // had been taken for them.
  void shrink(const CallContext& context, int64_t num_rows, int64_t num_forward_rows);

  const OutputForm& form() const { return form_; }
  int64_t num_rows() const { return output_.num_rows; }
  int64_t num_forward_rows() const { return num_forward_rows_; }
  bool are_in_region() const { return output_.block != nullptr; }
  void note_use(RegionUse& use) const {
    use.note(&RegionUse::dispatch, are_in_region(), form_.layout(num_rows()).num_bytes);
  }

  // src_idx is int32 [Q].
  const DispatchOutputs& output() const { return output_; }
  DispatchOutputs take_output() { return std::move(output_); }
  // Addresses of what else the handle keeps, 0: not there.
  uintptr_t send_rank_head() const { return send_rank_head_; }  // int32 [F, M]
  uintptr_t recv_src_meta() const { return recv_src_meta_; }    // uint8 [Q, 8]
  // Once.
  void give_sources(CallContext& context, DispatchRecord& record);

 private:
  TierRows(const GroupShape& group, const OutputForm& form, int64_t num_rows,
           int64_t num_forward_rows);
  size_t num_source_bytes() const;
  void lay_out_sources(uintptr_t base);

  OutputForm form_;
  DispatchOutputs output_;
  int64_t num_forward_rows_;
  std::shared_ptr<Block>
      source_block_;  // null: the framework's memory; the handle outlives the rows
  MadeTensor source_storage_;
  size_t num_head_bytes_;
  uintptr_t send_rank_head_ = 0, recv_src_meta_ = 0;
};

// Fills a block, if the Buffer poisons. No kernel writes over what the rail may still read before its
// rail peers have come, who have it by then; a fill would. What a graph's last combine stages, its
// next replay meets.
void poison_block(CallContext& context, const Block& block, const CallOrder& order);

}  // namespace deep_comm
