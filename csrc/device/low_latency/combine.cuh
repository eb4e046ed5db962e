// combine for decoding: every expert rank returns its rows to the ranks that own the tokens, where
// they are added.
//
// in     x [L, R*M, H] bfloat16 in dispatch's rows, or compact [R*M, H], one row per token;
//        topk_weights [T, K] at the source; at the expert's rank recv_tokens, recv_rows and, if the
//        weights were sent by dispatch, recv_weights
// out    combined_x [T, H]
// sum    an expert's rank adds weight * row over a token's top-k entries there, k ascending, in
//        float32, each product rounded by itself, and rounds to bfloat16; the source adds those
//        rows, ranks ascending, in float32, and rounds again. Compact rows are sent as they are.
//        One rounding: every row is sent as it is, and the source adds weight * row, k ascending,
//        and rounds. LogFMT: what an expert's rank sends is rounded to LogFMT-10 instead of
//        bfloat16 (move/logfmt.cuh).
// grid   B blocks, as in dispatch: block b serves the tokens that block b of their source sent
// words  as in dispatch, with returned rows; weight · owner: expert's rank · written by the
//        source's leading block · number in the word
// before the operation's dispatch has been received on this rank
// waits  buffer_credit: as in dispatch; weights: unblocked by the source's send phase; rows: by the
//        expert rank's
// not promised: nothing; the result does not depend on B
#pragma once

#include "device/low_latency/combine_receive.cuh"
#include "device/low_latency/combine_send.cuh"

namespace deep_comm {

template <CombineRows kRows, bool kLogFmt, bool kMayShrink, bool kRotatesPeers>
DC_DEVICE void low_latency_combine(const LowLatencyCombineArgs& args) {
  LowLatencyBuffer buffer{args.world, args.region, args.shape, LowLatencyKind::kCombine, 0};
  const LowLatencyShare share = LowLatencyShare::of(args.shape, args.split, arch::block_idx());
  const int rotation = kRotatesPeers ? block_rotation(args.world) : 0;
  BlockMemory memory = BlockMemory::make(args.shape, args.world.num_ranks, rotation);
  TaskForecast forecast{};
  if (args.phases.send) forecast = TaskForecast::make(args.world, share, rotation);
  arch::await_earlier_launch();
  arch::allow_later_launch();
  const LaunchState launch = LaunchState::load(buffer, args.phases);
  CombineInputs inputs = CombineInputs::load<kRows>(args, share, forecast);
  const Context context{args.world, Kernel::kLowLatencyCombine, launch.operation(args.phases),
                        kMayShrink && args.can_shrink};
  buffer.buffer_idx = static_cast<int>(context.generation & 1u);
  find_active(context, &memory);
  note_in_block(context, TraceStep::kBegun);
  return_credit(context, buffer, args.phases, launch);
  bool ok = true;
  if (args.phases.send)
    ok = combine_send<kRows, kLogFmt>(context, args, buffer, memory, launch, forecast, inputs);
  if (args.phases.send && ok) note_in_warp(context, TraceStep::kSent);
  if (args.phases.receive && ok)
    combine_receive<kRows, kLogFmt>(context, args, buffer, memory, inputs);
}

}  // namespace deep_comm
