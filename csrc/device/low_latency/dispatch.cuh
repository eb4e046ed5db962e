// dispatch for decoding: every token is sent to every rank that holds one of its experts, once,
// with no barrier and no host.
//
// in     x [T, H] bfloat16, topk_idx [T, K], optional topk_weights [T, K]; T <= M on every rank,
//        may differ
// out    expert-major: recv_x [L, R*M, row], rows of an expert by (source, token); recv_count,
//        src_info, layout_range
//        compact: recv_x [R*M, row], rows by (source, token), with local experts and weights of
//        each; for combine: recv_tokens, recv_rows, recv_weights
// grid   B blocks, the same B on all ranks: block b sends a share of this rank's tokens and
//        receives the shares that the blocks b of all ranks have sent (LowLatencyShare)
// smem   BlockMemory; with staged rows also a slot. Then no block has more than one token.
// phases send and receive in one launch, or in two with nothing running in between
//
//   word       owner     written by             read by         order                      reset
//   rows, scales, routes
//              receiver  block b of the source  its block b     relaxed; not zero          reader
//   announced  receiver  block 0 of the source  every block     relaxed; number in word    never
//   counts     receiver  last block of a source every block     relaxed; number in word    never
//   consumed   source    block 0 of the         senders, two    acquire; the launch that   never
//                        receiver's next launch operations      has read the buffer
//                        of this kind           later           has ended
//   records    this rank each block its own     later launches  stream order               never
//   received   this rank block 0                later launches  stream order               never
//   Words that are never reset hold numbers that only grow.
//
// before rows, scales and routes of this buffer are zero; the credit of two operations ago is
//        awaited here
// after  outputs complete on this stream; the buffer is zero again
// waits  buffer_credit: unblocked by the peer's next launch after its receive phase two operations
//        ago; announced, counts, rows: by its send phase. After a failed wait the buffer stays as
//        it is: only reset() makes it zero.
// not promised: rows past recv_count
#pragma once

#include "device/low_latency/dispatch_receive.cuh"
#include "device/low_latency/dispatch_send.cuh"

namespace deep_comm {

template <PayloadFormat kFormat, bool kMayShrink, DispatchRows kRows>
DC_DEVICE void low_latency_dispatch(const LowLatencyDispatchArgs& args) {
  static_assert(!kMayShrink || !uses_stage(kRows));
  constexpr bool kRotatesPeers = kRows == DispatchRows::kWhole || kRows == DispatchRows::kMany;
  LowLatencyBuffer buffer{args.world, args.region, args.shape, LowLatencyKind::kDispatch, 0};
  const int rotation = kRotatesPeers ? block_rotation(args.world) : 0;
  BlockMemory memory = BlockMemory::make(args.shape, args.world.num_ranks, rotation);
  const LowLatencyShare share = LowLatencyShare::of(args.shape, args.split, arch::block_idx());
  if (args.phases.send) zero_counters(args, memory);
  arch::await_earlier_launch();
  arch::allow_later_launch();
  // All loads of the beginning, before any of the values is used.
  const LaunchState launch = LaunchState::load(buffer, args.phases);
  SendInputs<kFormat, kRows> inputs{};
  if (args.phases.send) inputs = SendInputs<kFormat, kRows>::load(args, share);
  if (args.phases.send) arch::sync_block();  // the counters are zero
  if (args.phases.receive && arch::warp_idx() == arch::num_warps() - 1)
    forecast_tasks<kFormat>(args, buffer, memory, share);
  const Context context{args.world, Kernel::kLowLatencyDispatch, launch.operation(args.phases),
                        kMayShrink && args.can_shrink};
  buffer.buffer_idx = static_cast<int>(context.generation & 1u);
  find_active(context, &memory);
  note_in_block(context, TraceStep::kBegun);
  return_credit(context, buffer, args.phases, launch);
  bool ok = true;
  if (!args.phases.send) arch::sync_block();  // the forecast tasks are complete
  if (args.phases.send)
    ok = dispatch_send<kFormat, kRows>(context, args, buffer, memory, launch, inputs);
  if (args.phases.send && ok) note_in_warp(context, TraceStep::kSent);
  if (args.phases.receive && ok)
    dispatch_receive<kFormat, uses_stage(kRows)>(context, args, buffer, memory);
  // shared memory is freed with the block
  if constexpr (uses_stage(kRows)) arch::bulk_wait_read<0>();
}

}  // namespace deep_comm
