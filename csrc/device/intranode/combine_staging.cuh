// Staging of combine: memory for every row that returns to a rank, in its receive region. So
// senders need no credit. Rows of one peer are contiguous, peers ascending, without this rank. A
// peer's rows lie in the order in which it received them, hence by channel.
#pragma once

#include "device/intranode/args.cuh"
#include "device/layout/ring_layout.cuh"
#include "device/sync/barrier.cuh"

namespace deep_comm {

enum class CombineMode : int { kFailed, kRings, kStaged };

// The chunks that the sending warps of a block have taken, for its publisher; in shared memory.
struct LandedChunks {
  static constexpr int kMaxSenders = kMaxRanks;
  static constexpr uint32_t kDepth = 32;

  int items[kMaxSenders][kDepth];       // peer and chunk, by a sender's own count
  uint32_t num_published[kMaxSenders];  // of each sender

  // The whole block, before a barrier.
  DC_DEVICE void reset() {
    if (arch::thread_idx() < kMaxSenders) num_published[arch::thread_idx()] = 0;
  }
};

// Rows that rank `from` sent to rank `to`.
DC_DEVICE int num_rows_between(const CombineArgs& args, int from, int to) {
  const int num_ranks = args.world.num_ranks;
  const int32_t* prefix = args.rank_prefix_matrix + to;
  return arch::ld_nc(prefix + from * num_ranks) -
         (from == 0 ? 0 : arch::ld_nc(prefix + (from - 1) * num_ranks));
}

// Rows that return to `owner` from the peers before `end`.
DC_DEVICE int num_staged_rows(const CombineArgs& args, int owner, int end) {
  int num_rows = 0;
  for (int peer = 0; peer < end; ++peer) {
    if (peer != owner) num_rows += num_rows_between(args, owner, peer);
  }
  return num_rows;
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
// staging_lines: in shared memory, [p] where rank p's staging begins.
DC_DEVICE CombineMode enter_combine(const Context& context, const CombineArgs& args,
                                    uint32_t* staging_lines) {
  const World& world = args.world;
  const int peer = arch::lane_idx();
  bool ok = true, has_room = true;
  if (peer < world.num_ranks) {
    // Loaded before the peers are awaited, which hides the trips to memory.
    const uint32_t num_rows = num_staged_rows(args, peer, world.num_ranks);
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
    staging_lines[peer] = watch.value(0);
  }
  if (!arch::all(kFullMask, ok)) return CombineMode::kFailed;
  return arch::all(kFullMask, has_room) ? CombineMode::kStaged : CombineMode::kRings;
}

// The slot of row `row` in the staging that begins at `line` of owner's segment.
DC_DEVICE uint8_t* staging_slot(const CombineArgs& args, int owner, uint32_t line, int row) {
  return args.world.bases[owner] + static_cast<size_t>(line) * kLineBytes +
         static_cast<size_t>(row) * args.message.slot_bytes();
}

}  // namespace deep_comm
