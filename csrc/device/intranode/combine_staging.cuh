// combine's staged mode: memory for every row that comes to a rank, in its receive region, so that
// senders need no credit. Rows of one peer lie together, peers ascending, this rank left out; a
// peer's rows lie in the order in which it received them, hence by channel.
#pragma once

#include "device/intranode/args.cuh"
#include "device/layout/ring_layout.cuh"
#include "device/sync/barrier.cuh"

namespace deep_comm {

enum class CombineMode : int { kFailed, kRings, kStaged };

inline constexpr uint32_t kUnlimitedSlots = 1u << 31;
inline constexpr int kMaxChunks = kMaxChannels * kChunksOfLine;  // of one pair of ranks

// What the sending warps of a block have taken, for its publisher; in shared memory.
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

// Block 0: tells every peer where this rank's staging lies, then that it has come.
DC_DEVICE void announce_staging(const Context& context, const CombineArgs& args) {
  const World& world = args.world;
  const int peer = arch::thread_idx();
  if (peer < world.num_ranks) {
    ArrivedLine* line = world.arrived_line(peer, world.rank);
    const int parity = context.generation & 1u;
    arch::st_relaxed_sys(&line->staging_line[parity],
                         Tagged::pack(context.generation, args.staging_line));
    arch::st_relaxed_sys(
        &line->staging_rows[parity],
        Tagged::pack(context.generation, static_cast<uint32_t>(args.num_staging_rows)));
  }
  announce_arrival(context, args.signature);
}

// After await_arrivals.
DC_DEVICE uint32_t staging_line_of(const Context& context, int owner) {
  const ArrivedLine* line = context.world.arrived_line(context.world.rank, owner);
  const uint64_t* word = &line->staging_line[context.generation & 1u];
  return Tagged::unpack(arch::ld_relaxed_sys(word)).value;
}

// One warp of every block: waits for all ranks. The same mode in every block of every rank, unless
// one has given up.
DC_DEVICE CombineMode enter_combine(const Context& context, const CombineArgs& args) {
  const World& world = args.world;
  const int peer = arch::lane_idx();
  if (!await_arrivals(context, Stage::kEntryBarrier, args.signature)) return CombineMode::kFailed;
  bool has_room = true;
  if (peer < world.num_ranks) {
    const ArrivedLine* line = world.arrived_line(world.rank, peer);
    const int64_t num_rows =
        Tagged::unpack(arch::ld_relaxed_sys(&line->staging_rows[context.generation & 1u])).value;
    has_room = staging_line_of(context, peer) != 0 &&
               num_staged_rows(args, peer, world.num_ranks) <= num_rows;
  }
  return arch::all(kFullMask, has_room) ? CombineMode::kStaged : CombineMode::kRings;
}

// Where the rows lie that `from` returns to `owner`, from row `start` of their pair on.
DC_DEVICE RingSlots staging_slots(const Context& context, const CombineArgs& args, int owner,
                                  int from, int start) {
  const size_t slot_bytes = args.message.slot_bytes();
  const size_t first_row = static_cast<size_t>(num_staged_rows(args, owner, from)) + start;
  return {context.world.bases[owner] +
              static_cast<size_t>(staging_line_of(context, owner)) * kLineBytes +
              first_row * slot_bytes,
          kUnlimitedSlots, slot_bytes};
}

}  // namespace deep_comm
