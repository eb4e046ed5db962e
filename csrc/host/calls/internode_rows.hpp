// Memory for what a dispatch between nodes receives: in the receive region while there is room, where
// neighbours write it in place; else the framework's, which the rings fill.
#pragma once

#include <optional>

#include "device/layout/output.cuh"
#include "host/calls/dispatch.hpp"

namespace deep_comm {

// Rows and their metadata, in all but their number.
struct TierRowForm {
  PayloadForm payload;
  int num_topk = 0;  // 0: without indices
  int topk_idx_bytes = 0;
  bool has_weights = false;
  bool makes_handle = true;  // false: cached
  bool is_scratch = false;   // only kernels see the rows

  ElementType topk_idx_type() const { return topk_idx_bytes == 8 ? kInt64 : kInt32; }
};

// Q received rows, F forwarded ones: tokens that ranks of this local index send to this node.
class TierRows {
 public:
  // Empty: the region has no room.
  static std::optional<TierRows> in_region(CallContext& context, const TierRowForm& form,
                                           int64_t num_rows, int64_t num_forward_rows,
                                           const CallOrder& order);
  static TierRows allocate(CallContext& context, const TierRowForm& form, int64_t num_rows,
                           int64_t num_forward_rows, CallOrder& order);
  // Of rows in the region: so many have come, no more than there is room for, and lie there as if it
  // had been taken for them.
  void shrink(const CallContext& context, int64_t num_rows, int64_t num_forward_rows);

  int64_t num_rows() const { return num_rows_; }
  int64_t num_forward_rows() const { return num_forward_rows_; }
  bool are_in_region() const { return block_ != nullptr; }
  void note_use(RegionUse& use) const {
    use.note(&RegionUse::dispatch, are_in_region(), layout().num_bytes);
  }
  // Lines from the heap's base, 0: not in the region.
  uint32_t output_line() const;
  uint32_t src_line(const CallContext& context) const;

  // ---- addresses, 0: not there
  uintptr_t x() const { return x_.address; }
  uintptr_t scales() const { return scales_.address; }
  uintptr_t topk_idx() const { return topk_idx_.address; }
  uintptr_t topk_weights() const { return topk_weights_.address; }
  // of what the handle keeps
  uintptr_t send_rank_head() const { return send_rank_head_; }  // int32 [F, M]
  uintptr_t recv_src_idx() const { return recv_src_idx_; }      // int32 [Q]
  uintptr_t recv_src_meta() const { return recv_src_meta_; }    // uint8 [Q, 8]

  // ---- tensors, once each
  Object take_x(CallContext& context);
  Object take_scales(CallContext& context);
  Object take_topk_idx(CallContext& context);
  Object take_topk_weights(CallContext& context);
  // What the handle keeps.
  void give_sources(CallContext& context, DispatchRecord& record);

 private:
  TierRows(const GroupShape& group, const TierRowForm& form, int64_t num_rows,
           int64_t num_forward_rows);
  OutputLayout layout() const;
  size_t num_source_bytes() const;
  void make_rows(CallContext& context, CallOrder& order);
  void lay_out_rows(uintptr_t base);
  void lay_out_sources(uintptr_t base);
  Object tensor(CallContext& context, MadeTensor& part, ElementType type, int64_t num_columns);

  TierRowForm form_;
  int64_t num_rows_, num_forward_rows_;
  std::shared_ptr<Block> block_;         // null: the framework's memory
  std::shared_ptr<Block> source_block_;  // likewise; the handle outlives the rows
  std::shared_ptr<void> keeper_;         // of tensors over the first
  MadeTensor source_storage_;
  MadeTensor x_, scales_, topk_idx_, topk_weights_;  // in the region addresses alone
  size_t num_head_bytes_;
  uintptr_t send_rank_head_ = 0, recv_src_idx_ = 0, recv_src_meta_ = 0;
};

// Fills a block, if the Buffer poisons. No kernel writes over what the rail may still read before its
// rail peers have come, who have it by then; a fill would. What a graph's last combine stages, its
// next replay meets.
void poison_block(CallContext& context, const Block& block, const CallOrder& order);

}  // namespace deep_comm
