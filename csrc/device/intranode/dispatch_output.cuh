// Where every rank wants its rows: told at the entry of dispatch, together with the arrival.
#pragma once

#include "device/intranode/args.cuh"
#include "device/layout/output.cuh"
#include "device/sync/barrier.cuh"

namespace deep_comm {

// One receiver's output block, as this rank addresses it. x is null if the receiver has none.
struct PeerOutput {
  uint8_t* x;
  uint8_t* scales;
  uint8_t* topk_idx;
  float* topk_weights;
  int32_t* src_idx;
  int64_t num_rows;
};

// Block 0: tells every peer where this rank's block lies, then that it has come.
DC_DEVICE void announce_output(const Context& context, const DispatchArgs& args) {
  const World& world = args.world;
  const int peer = arch::thread_idx();
  if (peer < world.num_ranks) {
    ArrivedLine* line = world.arrived_line(peer, world.rank);
    arch::st_relaxed_sys(&line->output_line, Tagged::pack(context.generation, args.output_line));
    arch::st_relaxed_sys(&line->src_line, Tagged::pack(context.generation, args.src_line));
    arch::st_relaxed_sys(
        &line->output_rows,
        Tagged::pack(context.generation, static_cast<uint32_t>(args.num_recv_rows)));
  }
  announce_arrival(context, args.signature);
}

// Lane r, after await_arrivals: the block of rank r.
DC_DEVICE PeerOutput find_output(const DispatchArgs& args, int peer) {
  const World& world = args.world;
  const ArrivedLine* line = world.arrived_line(world.rank, peer);
  const uint32_t output_line = Tagged::unpack(arch::ld_relaxed_sys(&line->output_line)).value;
  const uint32_t src_line = Tagged::unpack(arch::ld_relaxed_sys(&line->src_line)).value;
  const int64_t num_rows = Tagged::unpack(arch::ld_relaxed_sys(&line->output_rows)).value;
  if (output_line == 0) return {};
  const OutputLayout layout =
      OutputLayout::make(num_rows, args.message.row_bytes, args.message.scale_row_bytes,
                         args.message.num_topk, args.topk_idx_bytes);
  uint8_t* block = world.bases[peer] + static_cast<size_t>(output_line) * kLineBytes;
  return {block + layout.x,
          block + layout.scales,
          block + layout.topk_idx,
          reinterpret_cast<float*>(block + layout.topk_weights),
          src_line == 0 ? nullptr
                        : reinterpret_cast<int32_t*>(world.bases[peer] +
                                                     static_cast<size_t>(src_line) * kLineBytes),
          num_rows};
}

}  // namespace deep_comm
