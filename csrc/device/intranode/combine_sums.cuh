// combine_sums: adds the rows that a token has on this rank, for the combine of an expanded output
// inside a node, which is launched right behind it and runs beside it. Chunk by chunk in rotation
// (combine_chunks.cuh). In staged mode a sum that returns to a peer is stored where the peer adds it;
// this rank's own ones, and all of them in ring mode, go where combine reads its x.
//
// in     as reduce_experts, and what combine gets
// out    rows of all peers' staging; reduced_x, reduced_weights, as reduce_experts
// grid   any number of blocks of two warps or more. Each block has every n-th chunk, its warps take
//        turns with parts of these; its last warp publishes for the others (sync/publisher.cuh says
//        why)
// smem   TokenRows, one per warp, then SumsEntry
// words  arrived, staging_line, staging_rows · as combine, for which block 0 announces
//        recv_line.landed · owner: receiver, this rank too · the chunk of rows is there · fence and
//        relaxed store / acquire sys. Staged mode alone: otherwise combine awaits the end of this
// before entry: as combine
// waits  for the entry of all ranks, whose combine_sums announces it before it waits; the publisher
//        for the other warps of its block, which wait for nothing more
// not promised: rows that a worst-case handle has dropped, which dispatch has reported: their places
//        keep what they held
#pragma once

#include "device/intranode/combine_staging.cuh"
#include "device/intranode/reduce_experts.cuh"
#include "device/sync/generation.cuh"
#include "device/sync/publisher.cuh"

namespace deep_comm {

// What the warps of one block share.
struct SumsEntry {
  CombineStart start;
  uint32_t bell;         // counts complete chunks
  uint32_t num_done[1];  // [most_chunks] complete parts of a chunk, by the block's own count

  // The chunks of one of num_blocks blocks, at most.
  DC_HOST_DEVICE static constexpr int most_chunks(int num_ranks, int num_blocks) {
    return ceil_div(kMaxChunks * num_ranks, num_blocks);
  }
  DC_HOST_DEVICE static constexpr size_t num_bytes(int num_ranks, int num_blocks) {
    return sizeof(SumsEntry) +
           sizeof(uint32_t) * static_cast<size_t>(most_chunks(num_ranks, num_blocks));
  }
  DC_DEVICE static SumsEntry& of_block() {
    return *reinterpret_cast<SumsEntry*>(arch::dynamic_smem() +
                                         arch::num_warps() * sizeof(TokenRows));
  }
};

// A part of a row that returns, for one warp.
struct RowPart {
  static constexpr int kNumVecs = 4 * kWarpSize;

  int chunk_idx;   // by the block's own count
  int item;        // of the chunk: ReturnedChunks::at
  int chunk_rows;  // that the chunk has; 0: there is no further part
  int row;         // among those that return to the peer
  int token;       // received
  int number;      // in the row

  DC_DEVICE int peer() const { return item / kMaxChunks; }
};

// The parts of a warp, one after the other. A whole chunk per warp would let all chunks be ready at
// the end, and none before.
class PartTurns {
 public:
  DC_DEVICE explicit PartTurns(const CombineArgs& args)
      : chunks_(args),
        parts_of_row_(ceil_div(args.message.row_bytes / 16, RowPart::kNumVecs)),
        parts_of_chunk_(parts_of_row_ * chunks_.most_chunk_rows()),
        turn_(arch::warp_idx()) {}

  DC_DEVICE int parts_of_row() const { return parts_of_row_; }
  DC_DEVICE RowPart next() {
    while (true) {
      const int idx = turn_ / parts_of_chunk_, part = turn_ - idx * parts_of_chunk_;
      const int item =
          chunks_.at(static_cast<uint32_t>(idx * arch::num_blocks() + arch::block_idx()));
      if (item == chunks_.kEnd) return {};
      turn_ += arch::num_warps() - 1;  // the last warp publishes
      const Chunk chunk = chunks_.chunk(item);
      const int row = part / parts_of_row_;
      if (row >= chunk.num_rows) continue;  // short, or none
      return {idx,
              item,
              chunk.num_rows,
              chunk.first + row,
              static_cast<int>(chunk.x_row) + row,
              part - row * parts_of_row_};
    }
  }

 private:
  ReturnedChunks<true> chunks_;
  int parts_of_row_;
  int parts_of_chunk_;
  int turn_;
};

// Where the sums go.
class SumPlaces {
 public:
  DC_DEVICE SumPlaces(const CombineSumsArgs& args, const SumsEntry& entry)
      : args_(args), start_(entry.start), is_staged_(entry.start.mode == CombineMode::kStaged) {}
  DC_DEVICE uint8_t* row(const RowPart& part) const {
    return at_peer(part)
               ? slot(part)
               : args_.sums.reduced_x + static_cast<int64_t>(part.token) * args_.sums.row_bytes;
  }
  DC_DEVICE float* weights(const RowPart& part) const {
    return at_peer(part) ? reinterpret_cast<float*>(slot(part) + args_.sums.row_bytes)
                         : args_.sums.reduced_weights +
                               static_cast<int64_t>(part.token) * args_.sums.num_topk;
  }

 private:
  DC_DEVICE bool at_peer(const RowPart& part) const {
    return is_staged_ && part.peer() != args_.world.rank;
  }
  DC_DEVICE uint8_t* slot(const RowPart& part) const {
    return start_.places[part.peer()] +
           static_cast<size_t>(part.row) * args_.combine.message.slot_bytes();
  }

  const CombineSumsArgs& args_;
  const CombineStart& start_;
  bool is_staged_;
};

// Parts after which a chunk counts as complete.
DC_DEVICE uint32_t parts_of_chunk(int chunk_rows, int parts_of_row) {
  return arch::fault(Fault::kEarlySums) ? 1u : static_cast<uint32_t>(chunk_rows * parts_of_row);
}

// One lane, when a part is complete: rings if its chunk is.
DC_DEVICE void complete_part(SumsEntry* entry, const RowPart& part, int parts_of_row) {
  // acq_rel, pairs with itself and with publish_sum_chunks, which may read the word before the bell
  // rings: whoever sees the last part counted has what all warps have stored.
  const uint32_t num_done = 1 + arch::atomic_add_acq_rel_cta(&entry->num_done[part.chunk_idx], 1u);
  if (num_done != parts_of_chunk(part.chunk_rows, parts_of_row)) return;
  // pairs with: publish_sum_chunks — the word
  arch::atomic_add_acq_rel_cta(&entry->bell, 1u);
}

// One warp: sets the words of the block's complete chunks. A lane has every 32nd chunk of the block.
DC_DEVICE void publish_sum_chunks(const Context& context, const CombineArgs& args, int parts_of_row,
                                  SumsEntry* entry) {
  const ReturnedChunks<true> chunks(args);
  const int lane = arch::lane_idx();
  int idx = lane - kWarpSize, item = chunks.kNone;
  uint32_t num_parts = 0;  // of the chunk
  while (true) {
    // The next chunk of each lane that has none. The whole warp finds it.
    while (const uint32_t wanting = arch::ballot(kFullMask, item == chunks.kNone)) {
      const int other = arch::ffs(wanting) - 1;
      const int next_idx = arch::shfl(kFullMask, idx, other) + kWarpSize;
      const int next =
          chunks.at(static_cast<uint32_t>(next_idx * arch::num_blocks() + arch::block_idx()));
      const int num_rows = chunks.chunk(next).num_rows;
      if (lane == other) {
        idx = next_idx;
        item = next;
        num_parts = parts_of_chunk(num_rows, parts_of_row);
      }
    }
    if (arch::all(kFullMask, item == chunks.kEnd)) return;
    // Reads the bell before any lane reads its word: a later chunk rings again.
    const uint32_t rung = arch::ld_acquire_cta(&entry->bell);
    arch::sync_warp();
    // Relaxed: with the fence below an acquire.
    const bool is_complete = item >= 0 && arch::ld_relaxed_cta(&entry->num_done[idx]) >= num_parts;
    if (arch::any(kFullMask, is_complete)) {
      // With the store below, a release; pairs with: TokenWatch::look — the chunk's rows
      arch::fence_acq_rel_sys();
      if (is_complete) {
        if (!arch::fault(Fault::kLostSums)) {
          arch::st_relaxed_sys(
              landed_word(context.world, item / kMaxChunks, context.world.rank, item % kMaxChunks),
              Tagged::pack(context.generation, 1));
        }
        item = chunks.kNone;
      }
      continue;
    }
    if (!await_bell(context, &entry->bell, rung)) return;
  }
}

template <Dtype kDtype>
DC_DEVICE void combine_sums(const CombineSumsArgs& args) {
  const World& world = args.world;
  const ReduceExpertsArgs& sums = args.sums;
  const Context context{world, Kernel::kCombine, current_generation(world)};
  SumsEntry& entry = SumsEntry::of_block();
  const int most_chunks = SumsEntry::most_chunks(world.num_ranks, arch::num_blocks());
  for (int idx = arch::thread_idx(); idx < most_chunks; idx += arch::num_threads()) {
    entry.num_done[idx] = 0;
  }
  if (arch::thread_idx() == 0) entry.bell = 0;
  // Combine advances the generation: all threads have read it.
  arch::sync_block();
  arch::allow_later_launch();
  if (arch::block_idx() == 0) announce_staging(context, args.combine);
  if (arch::warp_idx() == 0) enter_combine(context, args.combine, &entry.start);
  // Hands each lane's acquire to all warps.
  arch::sync_block();
  if (entry.start.mode == CombineMode::kFailed) return;
  const bool is_staged = entry.start.mode == CombineMode::kStaged;
  PartTurns turns(args.combine);
  if (arch::warp_idx() == arch::num_warps() - 1) {
    if (is_staged) publish_sum_chunks(context, args.combine, turns.parts_of_row(), &entry);
    return;
  }

  TokenRows& rows = TokenRows::of_warp();
  const int num_tokens = num_received(world, sums.rank_prefix_matrix, sums.num_tokens_limit);
  const int num_vecs = sums.row_bytes / 16;
  const SumPlaces places(args, entry);
  // A token's rows are loaded a turn ahead: the sum of a part costs two to four trips to memory, and
  // this would be one more.
  LoadedRows ahead;
  const auto load_rows = [&](const RowPart& part) {
    if (part.chunk_rows == 0 || part.token >= num_tokens) return;
    ahead.load(sums.recv_rows, part.token, sums.num_topk);
  };
  RowPart part = turns.next();
  load_rows(part);
  while (part.chunk_rows != 0) {
    const int num_rows = rows.take(ahead, sums.num_rows);
    const RowPart next = turns.next();
    load_rows(next);
    if (part.token < num_tokens) {
      reduce_rows_of_token<kDtype>(sums, places.row(part), rows, num_rows,
                                   part.number * RowPart::kNumVecs,
                                   min_of(num_vecs, (part.number + 1) * RowPart::kNumVecs));
      if (sums.weights != nullptr && part.number == 0) {
        return_weights(sums, places.weights(part), part.token);
      }
    }
    arch::sync_warp();  // what the lanes have stored
    if (is_staged && arch::lane_idx() == 0) complete_part(&entry, part, turns.parts_of_row());
    part = next;
  }
}

}  // namespace deep_comm
