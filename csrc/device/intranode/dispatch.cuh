// dispatch: every token is sent to every rank that holds one of its experts.
//
// in     x [T, H] any dtype, optional x_scales, topk_idx, topk_weights; send_head,
//        is_token_in_rank, prefix matrices
// out    recv_x [N, H] sorted by (source rank, source token), with scales, local expert ids,
//        weights, recv_src_idx; recv_channel_prefix_matrix [R, C]
// modes  direct (dispatch_direct.cuh) if every rank's outputs lie in its receive region and have
//        room for its rows: senders write the final rows. Otherwise rings (dispatch_ring.cuh). The
//        ranks decide on the device, by words that are the same for all, so no host needs to know
//        what the others chose: in the notify before, if it found room everywhere, else at entry. A
//        speculative launch has outputs for direct mode only. Without direct mode it leaves no
//        trace, and the host launches again
// grid   num_channels blocks of as many warps as the larger of both modes needs
// beside the end of the notify before it, where launches may begin early: a word of that notify says
//        when all is there that this kernel reads. It ends, and tells its peers so, after notify
// words  arrived, output_line, src_line, output_rows · owner: reader · written by each peer's
//        block 0 · read at entry
//        notified, and the headers of the counts with the outputs' locations · this rank · written
//        by the notify before
// before nothing: entry is a barrier, here or in the notify; after it every rank's rings and its
//        output block are free
// after  outputs complete on this stream
// not promised: which SM moves a row, and when; rows past the received ones, unless fill_tail
#pragma once

#include "device/intranode/dispatch_cast.cuh"
#include "device/intranode/dispatch_direct.cuh"
#include "device/intranode/dispatch_output.cuh"
#include "device/intranode/dispatch_ring.cuh"
#include "device/sync/generation.cuh"

namespace deep_comm {

// Rows that the output of a rank must have.
template <class Form>
DC_DEVICE int32_t num_rows_at(const DispatchArgs& args, int rank) {
  if constexpr (Form::kExpanded) return arch::ld_nc(args.num_expanded + rank);
  const int num_ranks = args.world.num_ranks;
  return arch::ld_weak(args.rank_prefix_matrix + (num_ranks - 1) * num_ranks + rank);
}

// Warp 0: waits for all ranks and finds where their outputs lie. The block barrier after it hands
// each lane's acquire to all warps. The mode is the same in every block of every rank, unless one
// has failed.
template <class Form>
DC_DEVICE void enter_dispatch(const Context& context, const DispatchArgs& args,
                              NotifyResult notified, DispatchEntry* entry) {
  const int num_ranks = args.world.num_ranks, peer = arch::lane_idx();
  const bool is_direct_already = notified == NotifyResult::kDirect;
  bool is_direct = true, ok = true;
  if (peer < num_ranks) {
    const int32_t num_rows =
        // loaded before the peers are awaited, which hides the trip to memory
        num_rows_at<Form>(args, peer);
    OutputWords words{};
    const bool is_absent = args.world.is_absent(peer);
    bool is_out = false;
    if (!is_direct_already) {
      ok = await_output(context, args, peer, &words);
    } else {
      is_out = is_masked_out(args.world);  // loaded together with the peers' words
      if (!is_absent) words = words_of_notify(args.world, peer, context.generation - 1);
    }
    is_direct = is_direct_already || is_absent || words.has_room(num_rows);
    if (is_out) {
      report_masked_out(context, {Stage::kEntryBarrier, Word::kArrived, peer, -1}, 0);
      ok = false;
    }
    if (is_absent) {
      entry->outputs[peer] = PeerOutput{};  // has no rows
    } else if (ok && is_direct) {
      entry->outputs[peer] = output_at<Form>(args, peer, words, num_rows);
    }
  }
  ok = arch::all(kFullMask, ok);
  is_direct = arch::all(kFullMask, is_direct);
  if (peer == 0) {
    entry->mode = !ok         ? DispatchMode::kFailed
                  : is_direct ? DispatchMode::kDirect
                              : DispatchMode::kRings;
  }
  if constexpr (Form::kExpanded) {
    arch::sync_warp();  // the mode
    if (arch::block_idx() == 0) announce_expanding(context, args, entry->mode);
  }
}

// Fills the rows past the received ones, spread over the whole grid.
template <class Form>
DC_DEVICE void fill_tail_rows(const Context& context, const DispatchArgs& args) {
  const World& world = args.world;
  const int num_rows = num_rows_at<Form>(args, world.rank);
  if (num_rows > args.num_recv_rows && arch::block_idx() == 0 && arch::thread_idx() == 0) {
    report_error(context, {ErrorKind::kOverflow,
                           {Stage::kCheckArguments, Word::kNumRecvRows, world.rank, -1},
                           static_cast<uint64_t>(num_rows),
                           static_cast<uint64_t>(args.num_recv_rows),
                           0,
                           -1});
  }
  if (!args.fill_tail || Form::kExpanded) return;  // expanded: done by expand.cuh
  const int64_t num_threads = static_cast<int64_t>(arch::num_blocks()) * arch::num_threads();
  const int64_t thread =
      static_cast<int64_t>(arch::block_idx()) * arch::num_threads() + arch::thread_idx();
  for (int64_t row = num_rows + thread; row < args.num_recv_rows; row += num_threads) {
    arch::st_weak(args.recv_src_idx + row, -1);
    for (int k = 0; k < args.message.num_topk; ++k) {
      store_expert(args.recv_topk_idx, row * args.message.num_topk + k, args.topk_idx_bytes, -1);
      if (args.recv_topk_weights != nullptr) {
        arch::st_weak(args.recv_topk_weights + row * args.message.num_topk + k, 0.0f);
      }
    }
  }
  if (!args.zero_tail || num_rows >= args.num_recv_rows) return;
  const int64_t num_tail_rows = args.num_recv_rows - num_rows;
  Vec16* tail = reinterpret_cast<Vec16*>(args.recv_x +
                                         static_cast<int64_t>(num_rows) * args.message.row_bytes);
  const int64_t num_vecs =
      num_tail_rows * (args.message.row_bytes / static_cast<int>(sizeof(Vec16)));
  for (int64_t vec = thread; vec < num_vecs; vec += num_threads) arch::st_weak(tail + vec, Vec16{});
  const int64_t scale_row_bytes = static_cast<int64_t>(args.num_scales) * args.scale_bytes;
  for (int64_t byte = thread; byte < num_tail_rows * scale_row_bytes; byte += num_threads)
    arch::st_weak(args.recv_x_scales + num_rows * scale_row_bytes + byte, uint8_t{0});
}

// A moving warp of direct mode. Its loads begin before the mode is known. If this rank's own
// outputs lie in its receive region, the mode is probably direct.
template <class Form>
DC_DEVICE DispatchMode enter_and_move(const Context& context, const DispatchArgs& args,
                                      NotifyResult notified, typename Moved<Form>::Entry* entry) {
  using Mover = std::conditional_t<Form::kQuantised, CastingMover<Form>, TokenMover<Form>>;
  Mover mover(context, args, entry);
  mover.begin();
  if (arch::warp_idx() == 0) enter_dispatch<Form>(context, args, notified, entry);
  arch::sync_block_apart();
  if (entry->mode == DispatchMode::kDirect) {
    mover.run(entry->outputs);
  } else {
    mover.give_up();
  }
  return entry->mode;
}

template <class Form>
DC_DEVICE void dispatch(const DispatchArgs& args) {
  // expand_rows, which learns from words what it may read.
  if constexpr (Form::kExpanded) arch::allow_later_launch();
  using Entry = typename Moved<Form>::Entry;
  Entry* entry = reinterpret_cast<Entry*>(arch::dynamic_smem() + args.entry_offset);
  const auto [generation, notified] = start_dispatch(args, &entry->start);
  const Context context{args.world, Kernel::kDispatch, generation};
  const bool is_direct_already = notified == NotifyResult::kDirect;
  // No word is written, not even a generation: all ranks decide the same. So does expand_rows.
  if (notified == NotifyResult::kFailed || (args.is_speculative && !is_direct_already)) {
    return arch::await_earlier_launch();  // what follows in the stream comes after both
  }
  note_in_block(context, TraceStep::kBegun);
  if constexpr (Form::kExpanded) entry->sent.reset();
  if (arch::block_idx() == 0 && !is_direct_already) announce_output(context, args);
  const bool is_mover = args.output_line != 0 && arch::warp_idx() < args.num_move_warps;
  DispatchMode mode;
  if (is_mover) {
    mode = enter_and_move<Form>(context, args, notified, entry);
  } else {
    if (arch::warp_idx() == 0) enter_dispatch<Form>(context, args, notified, entry);
    arch::sync_block_apart();
    mode = entry->mode;
    if (arch::warp_idx() == arch::num_warps() - 1) {  // never a mover
      note_in_warp(context, TraceStep::kEntered, static_cast<uint32_t>(mode));
      retire_early(context);
    }
    if (mode == DispatchMode::kDirect) write_block_metadata<Form>(context, args, entry);
  }
  if (mode == DispatchMode::kDirect) {
    if (arch::block_idx() == 0 && args.recv_channel_prefix_matrix != nullptr)
      send_channel_starts(context, args);
    if (args.fill_tail) fill_tail_rows<Form>(context, args);
    finish_direct(context, args);
    return;
  }
  // A peer that has all rows from here may go on: see finish_direct.
  arch::await_earlier_launch();
  entry->progress.reset();
  arch::sync_block();  // also, movers that began for nothing have freed the stages
  if (mode == DispatchMode::kRings) {
    fill_tail_rows<Form>(context, args);
    dispatch_by_rings<Form>(context, args, entry->progress);
  }
}

}  // namespace deep_comm
