// dispatch, direct mode, for bfloat16 rows that are sent as FP8. A warp reads a row, casts it, and
// leaves the FP8 row and its scales in a stage. One bulk store per destination sends it from there,
// whole if it fits.
//
// smem   CastStages of num_move_warps warps
// else   as TokenMover, dispatch_direct.cuh
#pragma once

#include <type_traits>

#include "device/intranode/args.cuh"
#include "device/intranode/dispatch_chunks.cuh"
#include "device/intranode/dispatch_output.cuh"
#include "device/intranode/final_rows.cuh"
#include "device/layout/message.cuh"
#include "device/move/cast_stages.cuh"
#include "device/sync/generation.cuh"
#include "device/sync/work_queue.cuh"

namespace deep_comm {

// One warp: moves the tokens it takes. The first piece is cast before the peers have arrived
// (begin). Nothing is stored before that (run).
template <class Form>
class CastingMover {
 public:
  DC_DEVICE CastingMover(const Context& context, const DispatchArgs& args,
                         typename Moved<Form>::Entry* entry)
      : args_(args),
        tokens_(Moved<Form>::tokens(
            args, ask_for_items(&taken_work(context)->num_tokens, Moved<Form>::num_items(args),
                                arch::warp_idx(), args.num_move_warps))),
        peer_((args.world.rank + 1 + arch::lane_idx()) % args.world.num_ranks),
        is_storing_(arch::lane_idx() < args.world.num_ranks),
        pieces_(Pieces::of(args.message.row_bytes, args.direct_stage)),
        stages_(arch::dynamic_smem() + arch::warp_idx() * args.direct_stage.warp_bytes(),
                args.direct_stage, pieces_, args.scale_format),
        rows_(args, is_storing_ ? peer_ : 0),
        report_(context, args, entry) {}

  DC_DEVICE void begin() {
    if (tokens_.at(0) >= 0) cast(tokens_.at(0), 0);
    look_up(0);
  }

  DC_DEVICE void run(const PeerOutput* outputs) {
    const PeerOutput output = outputs[is_storing_ ? peer_ : 0];
    report_.take(tokens_, 0);
    for (uint32_t index = 0; tokens_.at(index) >= 0; ++index) {
      const int token = tokens_.at(index);
      const int64_t row = rows_.row();
      look_up(index + 1);
      report_.take(tokens_, index + 1);
      const bool goes = row >= 0 && row < output.num_rows;
      uint8_t* dst = output.x + row * args_.message.row_bytes;
      for (int piece = 0; piece < pieces_.num_pieces; ++piece) {
        if (stages_.num_stores() > 0) cast(token, piece);
        if (is_storing_) {
          if (goes) {
            arch::bulk_store(dst + piece * pieces_.piece_bytes, stages_.current(),
                             pieces_.bytes_of(piece));
          }
          arch::bulk_commit();
        }
        write_scales(outputs, piece, goes ? row : -1);
        stages_.advance_store();
      }
      report_.template stored<kStoresInFlight>(tokens_, index, stages_.num_stores());
    }
    arch::bulk_wait<0>();
    report_.finish();
  }

  // Instead of run, if the mode is not direct.
  DC_DEVICE void give_up() {}

 private:
  // Looks up the rows of the index-th token.
  DC_DEVICE void look_up(uint32_t index) {
    const int token = tokens_.at(index);
    rows_.look_up(is_storing_ && token >= 0 ? token : args_.num_tokens);
  }
  DC_DEVICE void cast(int token, int piece) {
    const size_t element = static_cast<size_t>(token) * args_.message.row_bytes;
    stages_.cast(args_.source + element * sizeof(Bf16), piece, is_storing_);
  }

  // All lanes, each with the row at its own peer, or -1.
  DC_DEVICE void write_scales(const PeerOutput* outputs, int piece, int64_t my_row) {
    const StageScales scales = stages_.scales(piece);
    for (int lane = 0; lane < args_.world.num_ranks; ++lane) {
      const int64_t row = arch::shfl(kFullMask, my_row, lane);
      const int peer = arch::shfl(kFullMask, peer_, lane);
      if (row < 0) continue;
      scales.store(outputs[peer].scales + row * args_.num_scales * sizeof(uint32_t));
    }
  }

  static constexpr uint32_t kStoresInFlight = 1;  // when older ones are reported
  using Rows = std::conditional_t<Form::kExpanded, FirstRows, FinalRows>;

  const DispatchArgs& args_;
  typename Moved<Form>::template Tokens<AskedQueue<Numbered>> tokens_;
  int peer_;
  bool is_storing_;
  Pieces pieces_;
  CastStages stages_;
  Rows rows_;
  typename Moved<Form>::Report report_;
};

}  // namespace deep_comm
