// Staging of combine: memory for every row that returns to a rank, in its receive region. So
// senders need no credit. Rows of one peer are contiguous, peers ascending, without this rank. A
// peer's rows lie in the order in which it received them, hence by channel.
#pragma once

#include "device/intranode/combine_chunks.cuh"
#include "device/layout/ring_layout.cuh"
#include "device/sync/barrier.cuh"

namespace deep_comm {

enum class CombineMode : int { kFailed, kRings, kStaged };

// What a block knows once all ranks have entered; in shared memory.
struct CombineStart {
  CombineMode mode;
  int32_t sent[kMaxRanks * kMaxRanks];  // [R, R] rank_prefix_matrix
  uint8_t* places[kMaxRanks];  // staged mode: where the rows that return to each rank begin there

  // Rows that rank `from` of num_ranks sent to rank `to`.
  DC_DEVICE int num_rows(int num_ranks, int from, int to) const {
    const int32_t* row = sent + from * num_ranks + to;
    return row[0] - (from == 0 ? 0 : row[-num_ranks]);
  }
};

// The slot of row `row` in the staging that begins at `line` of owner's segment.
DC_DEVICE uint8_t* staging_slot(const CombineArgs& args, int owner, uint32_t line, int row) {
  return args.world.bases[owner] + static_cast<size_t>(line) * kLineBytes +
         static_cast<size_t>(row) * args.message.slot_bytes();
}

// Block 0: announces to every peer that this rank has entered, and where its staging lies.
DC_DEVICE void announce_staging(const Context& context, const CombineArgs& args) {
  const World& world = args.world;
  const int peer = arch::thread_idx();
  if (!world.takes_part(peer)) return;
  ArrivedLine* line = world.arrived_line(peer, world.rank);
  const int parity = context.generation & 1u;
  announce_arrival(context, args.signature,
                   {&line->staging_line[parity], &line->staging_rows[parity]},
                   {args.staging_line, static_cast<uint32_t>(args.num_staging_rows)});
}

// One warp of every block: waits for all ranks. The block barrier after it hands each lane's acquire
// to all warps. The mode is the same in every block of every rank, unless one has failed.
DC_DEVICE void enter_combine(const Context& context, const CombineArgs& args, CombineStart* start) {
  const World& world = args.world;
  const int num_ranks = world.num_ranks, peer = arch::lane_idx();
  // Loaded before the peers are awaited, which hides the trip to memory.
  for (int idx = peer; idx < num_ranks * num_ranks; idx += kWarpSize) {
    start->sent[idx] = arch::ld_nc(args.rank_prefix_matrix + idx);
  }
  arch::sync_warp();
  bool ok = true, has_room = true;
  if (peer < num_ranks) {
    uint32_t num_rows = 0, num_before = 0;  // that return to `peer`; of ranks before this one
    DC_NO_UNROLL
    for (int from = 0; from < num_ranks; ++from) {
      if (from == world.rank) num_before = num_rows;
      if (from != peer) num_rows += start->num_rows(num_ranks, peer, from);
    }
    const ArrivedLine* line = world.arrived_line(world.rank, peer);
    const int parity = context.generation & 1u;
    EntryWatch<2> watch{&line->arrived,
                        {&line->staging_line[parity], &line->staging_rows[parity]},
                        context.generation,
                        args.signature,
                        0,
                        {}};
    ok = await_entry(context, watch, Stage::kEntryBarrier, peer);
    has_room = world.is_absent(peer) || (watch.value(0) != 0 && num_rows <= watch.value(1));
    start->places[peer] = staging_slot(args, peer, watch.value(0), static_cast<int>(num_before));
  }
  ok = arch::all(kFullMask, ok);
  has_room = arch::all(kFullMask, has_room);
  if (peer == 0) {
    start->mode = !ok        ? CombineMode::kFailed
                  : has_room ? CombineMode::kStaged
                             : CombineMode::kRings;
  }
}

}  // namespace deep_comm
