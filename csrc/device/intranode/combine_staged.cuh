// combine, staged mode: every row has a slot of its own at the rank it returns to. So nobody waits
// for credit, and any block may send any chunk of rows and add any token.
//
// grid   any number of blocks; the num_staged_senders sending warps of all blocks take chunks, one
//        warp per block publishes them, one takes tokens, the last ones add them
//        (combine_watch.cuh). Chunks and tokens are taken in ascending order
// words  recv_line[chunk / 8].landed[chunk % 8] · owner: receiver · written by the sender's
//        publisher · fence and relaxed store / acquire sys
//        taken · this rank · see sync/generation.cuh
// waits  landed: unblocked by the sender of the chunk, which waits only for its own publisher,
//        which waits only until a sender rings; senders ring before they wait
//        of an expanded output: by combine_sums, whose publisher waits for the other warps of its
//        block alone, and these for nothing after the entry
#pragma once

#include "device/intranode/combine_watch.cuh"
#include "device/intranode/ring_send.cuh"
#include "device/move/row_weights.cuh"
#include "device/sync/generation.cuh"
#include "device/sync/work_queue.cuh"

namespace deep_comm {

// One warp: sends the chunks it takes. Loads begin before the peers have arrived (begin), stores
// after that (run). Lane r holds the rows of rank r.
class ChunkSender {
 public:
  DC_DEVICE ChunkSender(const Context& context, const CombineArgs& args, CombineEntry* entry,
                        StagePipe& pipe)
      : context_(context),
        args_(args),
        entry_(entry),
        pipe_(pipe),
        pieces_(Pieces::of(args.message.row_bytes, args.stage)),
        chunks_(ReturnedChunks<false>(args), taken_work(context)->num_chunks,
                arch::warp_idx() * arch::num_blocks() + arch::block_idx(),
                args.num_staged_senders) {}

  DC_DEVICE void begin() {
    take_chunk();
    if (load_.chunk.num_rows > 0) weights_.load(args_, row_of_x(load_.chunk, 0));
    while (load_.chunk.num_rows > 0 && pipe_.can_load()) load_next();
  }

  DC_DEVICE void run() {
    const int lane = arch::lane_idx(), warp = arch::warp_idx();
    uint32_t num_chunks = 0;
    for (Chunk chunk = taken_chunk(0); chunk.num_rows > 0; chunk = taken_chunk(num_chunks)) {
      if (!post(num_chunks, chunk.item)) break;
      uint8_t* base = entry_->start.places[chunk.peer()] +
                      static_cast<size_t>(chunk.first) * args_.message.slot_bytes();
      for (int row = 0; row < chunk.num_rows; ++row) {
        store_row(chunk, num_chunks, row,
                  base + static_cast<size_t>(row) * args_.message.slot_bytes());
      }
      if (static_cast<uint32_t>(lane) == num_chunks % kWarpSize) ends_ = pipe_.num_stores();
      ++num_chunks;
      report_landed(num_chunks);
    }
    if (lane == 0) pipe_.drain();
    if (!has_failed_) publish_rest(num_chunks);
    if (lane == 0) entry_->progress.finish(warp, num_landed_);
  }

  // Instead of run: frees the stages. The leader alone uses the pipeline next.
  DC_DEVICE void give_up() {
    while (pipe_.num_stores() != pipe_.num_loads()) {
      if (arch::lane_idx() == 0) pipe_.await_load();
      pipe_.advance_store();
    }
  }

 private:
  struct LoadCursor {
    Chunk chunk;
    uint32_t index = 0;
    int row = 0;
    int piece = 0;
  };

  // The index-th chunk of this warp, without rows after the last; no later one than is loaded next.
  DC_DEVICE Chunk taken_chunk(uint32_t index) const {
    return chunks_.items().chunk(chunks_.taken(index));
  }
  DC_DEVICE void take_chunk() {
    chunks_.at(load_.index);
    load_.chunk = taken_chunk(load_.index);
  }

  // A worst-case handle may name rows that were dropped, which dispatch has reported. Any row will
  // do.
  DC_DEVICE int64_t row_of_x(const Chunk& chunk, int row) const {
    return min_of<int64_t>(chunk.x_row + row, args_.num_rows - 1);
  }

  DC_DEVICE void load_next() {
    // Not right after the chunk before: the number of the next one may not be known yet
    // (work_queue.cuh).
    if (load_.row == load_.chunk.num_rows && load_.row != 0) {
      load_.row = 0;
      ++load_.index;
      take_chunk();
    }
    if (load_.chunk.num_rows == 0) return;
    const int64_t row = row_of_x(load_.chunk, load_.row);
    if (arch::lane_idx() == 0) {
      pipe_.make_room();
      pipe_.load(args_.x + row * args_.message.row_bytes + load_.piece * pieces_.piece_bytes,
                 pieces_.bytes_of(load_.piece));
    }
    pipe_.advance_load();
    if (++load_.piece < pieces_.num_pieces) return;
    load_.piece = 0;
    ++load_.row;
  }

  // Of this warp's index-th chunk.
  DC_DEVICE void store_row(const Chunk& chunk, uint32_t index, int row, uint8_t* slot) {
    const int meta_bytes = args_.message.meta_bytes;
    for (int piece = 0; piece < pieces_.num_pieces; ++piece) {
      int num_bytes = pieces_.bytes_of(piece);
      if (pieces_.is_last(piece) && meta_bytes != 0) {
        // The leader has seen this stage read out before any lane writes into it.
        arch::sync_warp();
        weights_.write(args_, pipe_.current() + num_bytes, row_of_x(chunk, row));
        // Before the bulk copy that reads them.
        arch::fence_proxy_async_shared();
        arch::sync_warp();
        weights_.load(args_, row + 1 < chunk.num_rows ? row_of_x(chunk, row + 1)
                                                      : row_of_x(taken_chunk(index + 1), 0));
        num_bytes += meta_bytes;
      }
      if (arch::lane_idx() == 0) {
        pipe_.await_load();
        pipe_.store(slot + piece * pieces_.piece_bytes, num_bytes);
      }
      pipe_.advance_store();
      load_next();
    }
  }

  // Tells the publisher what this warp's index-th chunk is, as soon as there is a free entry.
  DC_DEVICE bool post(uint32_t index, int item) {
    LandedChunks& landed = entry_->landed;
    bool ok = true;
    if (arch::lane_idx() == 0) {
      if (index >= LandedChunks::kDepth) {
        const uint32_t wanted = index + 1 - LandedChunks::kDepth;
        uint32_t seen = 0;
        ok = await<Scope::kCta>(
            context_, &landed.num_published[arch::warp_idx()],
            {Stage::kRetire, Word::kProgress, args_.world.rank, -1}, wanted,
            [=](uint32_t value) { return value >= wanted; }, &seen);
      }
      landed.items[arch::warp_idx()][index % LandedChunks::kDepth] = item;
    }
    ok = arch::shfl(kFullMask, static_cast<int>(ok), 0) != 0;
    has_failed_ = !ok;
    return ok;
  }

  // Publishes the last chunks directly: the publisher may be in the middle of a fence. The leader
  // alone has stored them.
  DC_DEVICE void publish_rest(uint32_t num_chunks) {
    // With the stores below, a release; pairs with: TokenWatch::look — the chunks' rows
    if (arch::lane_idx() == 0) arch::fence_acq_rel_sys();
    for (uint32_t index = num_landed_; index < num_chunks; ++index) {
      const int item = chunks_.taken(index);
      if (arch::lane_idx() != 0) continue;
      arch::st_relaxed_sys(
          landed_word(args_.world, item / kMaxChunks, args_.world.rank, item % kMaxChunks),
          Tagged::pack(context_.generation, 1));
    }
  }

  // Reports the chunks whose stores have landed. Waiting for the newest stores would empty the
  // pipeline, so they are reported later.
  DC_DEVICE void report_landed(uint32_t num_chunks) {
    constexpr uint32_t kInFlight = 3;
    uint32_t num_landed = num_landed_;
    while (num_landed < num_chunks &&
           arch::shfl(kFullMask, ends_, num_landed % kWarpSize) + kInFlight <= pipe_.num_stores()) {
      ++num_landed;
    }
    if (num_landed == num_landed_) return;
    num_landed_ = num_landed;
    if (arch::lane_idx() == 0) {
      arch::bulk_wait<kInFlight>();
      entry_->progress.report(arch::warp_idx(), num_landed);
    }
  }

  const Context& context_;
  const CombineArgs& args_;
  CombineEntry* entry_;
  StagePipe& pipe_;
  Pieces pieces_;
  AskedQueue<ReturnedChunks<false>> chunks_;
  LoadCursor load_;
  // Of the row that is stored next: begin loads the first row's, store_row the next row's. After
  // the last row they are of some row, and nobody writes them.
  RowWeights weights_;
  uint32_t ends_ = 0;  // lane i: stores up to the end of the last chunk whose index is i modulo 32
  uint32_t num_landed_ = 0;
  bool has_failed_ = false;
};

// One warp; lane w publishes what sender w has landed. One fence serves all senders: see
// publisher.cuh.
DC_DEVICE void publish_chunks(const Context& context, const CombineArgs& args,
                              CombineEntry* entry) {
  const World& world = args.world;
  const int lane = arch::lane_idx(), sender = min_of(lane, args.num_senders - 1);
  LandedChunks& landed = entry->landed;
  uint32_t num_published = 0;
  while (true) {
    const uint32_t rung = arch::ld_acquire_cta(&entry->progress.bell);
    arch::sync_warp();
    // Relaxed: with the fence below an acquire.
    const uint32_t word = arch::ld_relaxed_cta(&entry->progress.words[sender]);
    const uint32_t num_landed = word & ~Progress::kFinished;
    if (arch::any(kFullMask, num_landed != num_published)) {
      // pairs with: Progress::report — the chunks' stores, and their items.
      // With the stores below, a release; pairs with: TokenWatch::look — the chunks' rows
      arch::fence_acq_rel_sys();
      for (; num_published != num_landed; ++num_published) {
        if (lane != sender) continue;
        const int item = landed.items[sender][num_published % LandedChunks::kDepth];
        arch::st_relaxed_sys(landed_word(world, item / kMaxChunks, world.rank, item % kMaxChunks),
                             Tagged::pack(context.generation, 1));
      }
      // pairs with: ChunkSender::post — the items have been read
      if (lane == sender) arch::st_release_cta(&landed.num_published[sender], num_published);
    }
    if (arch::all(kFullMask, (word & Progress::kFinished) != 0)) return;
    if (!await_bell(context, &entry->progress.bell, rung)) return;
  }
}

// Staged mode, the warps of a block that do not send.
template <Dtype kDtype, bool kIsExpanded>
DC_DEVICE void receive_staged(const Context& context, const CombineArgs& args,
                              CombineEntry* entry) {
  const int reducer = arch::warp_idx() - args.num_senders - 2;
  if (reducer >= 0) {
    add_ready<kDtype>(context, args, entry, reducer);
  } else if (reducer == -1) {
    if constexpr (!kIsExpanded) publish_chunks(context, args, entry);
  } else {
    TokenWatch<kIsExpanded>(context, args, entry).run();
  }
}

}  // namespace deep_comm
