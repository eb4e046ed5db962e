// combine, staged mode: every row has a place of its own at the rank it returns to, so that nobody
// waits for credit, and any block may send any chunk of rows and add any token.
//
// grid   any number of blocks; num_senders warps take chunks, one publishes them, the last ones take
//        tokens, all in ascending order
// words  recv_line[chunk / 8].landed[chunk % 8] · owner: receiver · written by the sender's publisher
//                            · fence and relaxed store / acquire sys
//        taken · this rank · see sync/generation.cuh
// waits  landed: unblocked by the sender of the chunk, which waits for its own publisher alone, which
//        waits for nobody
#pragma once

#include "device/intranode/combine_reduce.cuh"
#include "device/intranode/ring_send.cuh"
#include "device/sync/generation.cuh"
#include "device/sync/work_queue.cuh"

namespace deep_comm {

// One rank's rows to or from another, in chunks.
struct ChunkedRows {
  int num_rows;
  int chunk_rows;

  DC_DEVICE static ChunkedRows of(int num_rows) {
    constexpr int kMinRows = 1;  // the fewer, the sooner a token can be added
    return {num_rows, max_of(kMinRows, ceil_div(num_rows, kMaxChunks))};
  }
  DC_DEVICE int num_chunks() const { return ceil_div(num_rows, chunk_rows); }
};

// Lane 0 of a sending warp: chunks of one peer's rows until all are taken, then the next peer's.
// The first chunks go to the warps in turn, as many to each peer.
class TakeChunk {
 public:
  DC_DEVICE TakeChunk(const Context& context, const CombineArgs& args)
      : args_(&args),
        counters_(taken_work(context)->num_chunks),
        num_left_(args.world.num_ranks - 1) {
    if (num_left_ == 0) return;
    const int num_peers = num_left_;
    num_firsts_ = args.num_senders / num_peers * arch::num_blocks();
    const int turn = (arch::warp_idx() + arch::block_idx()) % num_peers;
    look_at((args.world.rank + 1 + turn) % args.world.num_ranks);
  }
  DC_DEVICE int first() {
    if (num_left_ == 0) return -1;
    const uint32_t own =
        arch::warp_idx() / (args_->world.num_ranks - 1) * arch::num_blocks() + arch::block_idx();
    return own < min_of(num_firsts_, num_chunks_) ? item_of(own) : (*this)();
  }
  DC_DEVICE int operator()() {
    while (num_left_ > 0) {
      const uint32_t chunk = num_firsts_ + arch::atomic_add_relaxed_gpu(&counters_[peer_], 1u);
      if (chunk < num_chunks_) return item_of(chunk);
      --num_left_;
      const int next = (peer_ + 1) % args_->world.num_ranks;
      look_at(next == args_->world.rank ? (next + 1) % args_->world.num_ranks : next);
    }
    return -1;
  }

 private:
  DC_DEVICE int item_of(uint32_t chunk) const {
    return peer_ * kMaxChunks + static_cast<int>(chunk);
  }
  DC_DEVICE void look_at(int peer) {
    peer_ = peer;
    num_chunks_ = ChunkedRows::of(num_rows_between(*args_, peer, args_->world.rank)).num_chunks();
  }

  const CombineArgs* args_;
  uint32_t* counters_;
  int num_left_;  // peers
  int peer_ = 0;
  uint32_t num_chunks_ = 0;
  uint32_t num_firsts_ = 0;  // of each peer
};

// One warp: sends the chunks it takes. Loads begin before the peers have come (begin), stores after
// (run). Lane r knows the rows of rank r.
class ChunkSender {
 public:
  DC_DEVICE ChunkSender(const Context& context, const CombineArgs& args, CombineEntry* entry,
                        StagePipe& pipe)
      : context_(context),
        args_(args),
        entry_(entry),
        pipe_(pipe),
        pieces_(Pieces::of(args.message.row_bytes, args.stage)),
        chunks_(take_chunks(context, args)) {
    const int peer = min_of(arch::lane_idx(), args.world.num_ranks - 1);
    rows_ = ChunkedRows::of(num_rows_between(args, peer, args.world.rank));
    first_row_ = static_cast<int>(first_row_of(args, peer));
  }

  DC_DEVICE void begin() {
    load_.chunk = chunk_at(0);
    while (load_.chunk.num_rows > 0 && pipe_.can_load()) load_next();
    const int peer = min_of(arch::lane_idx(), args_.world.num_ranks - 1);
    first_staged_row_ = num_staged_rows(args_, peer, args_.world.rank);
  }

  DC_DEVICE void run() {
    const int lane = arch::lane_idx(), warp = arch::warp_idx();
    const int peer = min_of(lane, args_.world.num_ranks - 1);
    const uint64_t my_base = reinterpret_cast<uint64_t>(
        staging_slot(args_, peer, entry_->staging_lines[peer], first_staged_row_));
    uint32_t num_chunks = 0;
    for (Chunk chunk = chunk_at(0); chunk.num_rows > 0; chunk = chunk_at(num_chunks)) {
      if (!post(num_chunks, chunk.item)) break;
      uint8_t* base = reinterpret_cast<uint8_t*>(arch::shfl(kFullMask, my_base, chunk.peer()));
      base += static_cast<size_t>(chunk.first) * args_.message.slot_bytes();
      for (int row = 0; row < chunk.num_rows; ++row) {
        store_row(chunk.x_row + row, base + static_cast<size_t>(row) * args_.message.slot_bytes());
      }
      if (static_cast<uint32_t>(lane) == num_chunks % kWarpSize) ends_ = pipe_.num_stores();
      ++num_chunks;
      report_landed(num_chunks);
    }
    if (lane == 0) {
      pipe_.drain();
      entry_->progress.finish(warp, has_failed_ ? num_landed_ : num_chunks);
    }
  }

  // Instead of run: the stages are free again.
  DC_DEVICE void give_up() {
    while (pipe_.num_stores() != pipe_.num_loads()) {
      if (arch::lane_idx() == 0) pipe_.await_load();
      pipe_.advance_store();
    }
    arch::sync_warp();
  }

 private:
  DC_DEVICE static WorkQueue<TakeChunk> take_chunks(const Context& context,
                                                    const CombineArgs& args) {
    TakeChunk take(context, args);
    const int first = arch::lane_idx() == 0 ? take.first() : -1;
    return {take, first};
  }

  struct Chunk {
    int item;   // peer and number
    int first;  // row, among those that return to the peer
    int num_rows;
    int64_t x_row;

    DC_DEVICE int peer() const { return item / kMaxChunks; }
  };
  struct LoadCursor {
    Chunk chunk;
    uint32_t index = 0;
    int row = 0;
    int piece = 0;
  };

  // The index-th chunk of this warp; without rows behind the last.
  DC_DEVICE Chunk chunk_at(uint32_t index) {
    const int item = chunks_.at(index);
    if (item < 0) return {-1, 0, 0, 0};
    const int peer = item / kMaxChunks, chunk = item % kMaxChunks;
    const int num_rows = arch::shfl(kFullMask, rows_.num_rows, peer);
    const int chunk_rows = arch::shfl(kFullMask, rows_.chunk_rows, peer);
    const int first = chunk * chunk_rows;
    return {item, first, min_of(chunk_rows, num_rows - first),
            static_cast<int64_t>(arch::shfl(kFullMask, first_row_, peer)) + first};
  }

  DC_DEVICE void load_next() {
    if (load_.chunk.num_rows == 0) return;
    // A worst-case handle may name rows that were dropped; dispatch has said so. Any row will do.
    const int64_t row = min_of<int64_t>(load_.chunk.x_row + load_.row, args_.num_rows - 1);
    if (arch::lane_idx() == 0) {
      pipe_.make_room();
      pipe_.load(args_.x + row * args_.message.row_bytes + load_.piece * pieces_.piece_bytes,
                 pieces_.bytes_of(load_.piece));
    }
    pipe_.advance_load();
    if (++load_.piece < pieces_.num_pieces) return;
    load_.piece = 0;
    if (++load_.row < load_.chunk.num_rows) return;
    load_.row = 0;
    load_.chunk = chunk_at(++load_.index);
  }

  DC_DEVICE void store_row(int64_t x_row, uint8_t* slot) {
    const int meta_bytes = args_.message.meta_bytes;
    for (int piece = 0; piece < pieces_.num_pieces; ++piece) {
      int num_bytes = pieces_.bytes_of(piece);
      if (pieces_.is_last(piece) && meta_bytes != 0) {
        arch::
            sync_warp();  // the leader has seen this stage read out before any lane writes into it
        write_weights(args_, pipe_.current() + num_bytes,
                      min_of<int64_t>(x_row, args_.num_rows - 1));
        arch::fence_proxy_async_shared();  // before the bulk copy that reads them
        arch::sync_warp();
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

  // Tells the publisher what this warp's index-th chunk is, once there is room for saying so.
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

  // Reports the chunks whose stores have landed. Waiting for the newest stores would empty the
  // pipeline: they are left for later.
  DC_DEVICE void report_landed(uint32_t num_chunks) {
    constexpr uint32_t kInFlight = 6;
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
  WorkQueue<TakeChunk> chunks_;
  ChunkedRows rows_;          // that return to this lane's rank
  int first_row_;             // of them, in x
  int first_staged_row_ = 0;  // of them, in the staging of this lane's rank
  LoadCursor load_;
  uint32_t ends_ = 0;  // lane i: stores up to the end of the last chunk whose index is i modulo 32
  uint32_t num_landed_ = 0;
  bool has_failed_ = false;
};

// The word by which `from` tells `owner` that a chunk has landed.
DC_DEVICE uint64_t* landed_word(const World& world, int owner, int from, int chunk) {
  return &world.recv_line(owner, chunk / kChunksOfLine, from)->landed[chunk % kChunksOfLine];
}

// One warp; lane w publishes what sender w has landed. One fence serves all of
// them; see publisher.cuh.
DC_DEVICE void publish_chunks(const Context& context, const CombineArgs& args,
                              CombineEntry* entry) {
  const World& world = args.world;
  const int lane = arch::lane_idx(), sender = min_of(lane, args.num_senders - 1);
  LandedChunks& landed = entry->landed;
  uint32_t num_published = 0;
  while (true) {
    const uint32_t rung = arch::ld_acquire_cta(&entry->progress.bell);
    arch::sync_warp();
    // pairs with: Progress::report — the chunks' stores, and what they are.
    const uint32_t word = arch::ld_acquire_cta(&entry->progress.words[sender]);
    const uint32_t num_landed = word & ~Progress::kFinished;
    if (arch::any(kFullMask, num_landed != num_published)) {
      // With the stores below, a release; pairs with: StagedReducer::await_row — the chunks' rows.
      arch::fence_acq_rel_sys();
      for (; num_published != num_landed; ++num_published) {
        if (lane != sender) continue;
        const int item = landed.items[sender][num_published % LandedChunks::kDepth];
        arch::st_relaxed_sys(landed_word(world, item / kMaxChunks, world.rank, item % kMaxChunks),
                             Tagged::pack(context.generation, 1));
      }
      // pairs with: ChunkSender::post — the items have been read.
      if (lane == sender) arch::st_release_cta(&landed.num_published[sender], num_published);
    }
    if (arch::all(kFullMask, (word & Progress::kFinished) != 0)) return;
    bool ok = true;
    if (lane == 0) {
      uint32_t seen = 0;
      ok = await<Scope::kCta>(
          context, &entry->progress.bell, {Stage::kRetire, Word::kProgress, world.rank, -1},
          rung + 1, [=](uint32_t value) { return value != rung; }, &seen);
    }
    if (arch::shfl(kFullMask, static_cast<int>(ok), 0) == 0) return;
  }
}

// One warp: adds the tokens it takes. Lane r < R looks after the rows of rank r: in the staging, or
// in x for this rank's own.
template <Dtype kDtype>
class StagedReducer {
 public:
  DC_DEVICE StagedReducer(const Context& context, const CombineArgs& args, CombineEntry* entry,
                          int reducer)
      : context_(context),
        args_(args),
        rows_(entry->rows[reducer]),
        tokens_(deal_items(&taken_work(context)->num_tokens, args.num_tokens, reducer,
                           CombineEntry::num_reduce_warps(args))),
        per_channel_(ceil_div(args.num_tokens, args.ring.num_channels)),
        own_first_(first_row_of(args, args.world.rank)) {
    const int lane = arch::lane_idx(), rank = args.world.rank;
    is_rank_ = lane < args.world.num_ranks;
    is_peer_ = is_rank_ && lane != rank;
    if (is_peer_) {
      slots_ = {staging_slot(args, rank, args.staging_line, num_staged_rows(args, rank, lane)),
                kUnlimitedSlots, args.message.slot_bytes()};
      chunk_rows_ = ChunkedRows::of(num_rows_between(args, rank, lane)).chunk_rows;
    } else {  // of x, which nobody writes here
      const size_t row_bytes = args.message.row_bytes;
      slots_ = {const_cast<uint8_t*>(args.x) + own_first_ * row_bytes, kUnlimitedSlots, row_bytes};
    }
  }

  DC_DEVICE void run() {
    look_up(0);
    for (uint32_t index = 0;; ++index) {
      const int token = tokens_.at(index);
      if (token < 0) return;
      int row_idx = head_ < 0 ? -1 : before_channel_ + head_;
      look_up(index + 1);  // while this token is added
      // A worst-case handle may name rows that were dropped; dispatch has said so.
      if (arch::lane_idx() == args_.world.rank && own_first_ + row_idx >= args_.num_rows)
        row_idx = -1;
      const bool ok = row_idx < 0 || !is_peer_ || await_row(row_idx);
      arch::sync_warp();  // hands each lane's acquire to the whole warp
      if (!arch::all(kFullMask, ok)) return;
      const int64_t own_row = own_first_ + arch::shfl(kFullMask, row_idx, args_.world.rank);
      add_token<kDtype>(args_, rows_, token, row_idx < 0 ? nullptr : slots_.slot(row_idx), own_row);
      arch::sync_warp();  // all lanes have done with the addresses
    }
  }

 private:
  // Lane r: where the index-th token's row lies among those of rank r.
  DC_DEVICE void look_up(uint32_t index) {
    const int token = tokens_.at(index);
    head_ = -1;
    if (token < 0 || !is_rank_) return;
    const int channel = token / per_channel_;
    const int32_t* prefix =
        args_.channel_prefix_matrix + arch::lane_idx() * args_.ring.num_channels;
    head_ = arch::ld_nc(args_.send_head + static_cast<int64_t>(token) * args_.world.num_ranks +
                        arch::lane_idx());
    before_channel_ = channel == 0 ? 0 : arch::ld_nc(prefix + channel - 1);
  }
  // By the chunk, not by all chunks before it (docs/design/0020, "Rejected").
  DC_DEVICE bool await_row(int row_idx) {
    const int chunk = row_idx / chunk_rows_;
    if (chunk == known_chunk_) return true;
    known_chunk_ = chunk;
    uint32_t seen = 0;
    const int peer = arch::lane_idx();
    return await_tagged(context_, landed_word(args_.world, args_.world.rank, peer, chunk),
                        {Stage::kReduce, Word::kLanded, peer, -1}, 1, &seen);
  }

  const Context& context_;
  const CombineArgs& args_;
  const uint8_t** rows_;
  WorkQueue<TakeNext> tokens_;
  int per_channel_;
  int64_t own_first_;
  bool is_rank_;
  bool is_peer_;
  RingSlots slots_;
  int chunk_rows_ = 1;
  int known_chunk_ = -1;  // has landed
  int head_ = -1;
  int before_channel_ = 0;
};

// The staged mode of one block's warps that do not send.
template <Dtype kDtype>
DC_DEVICE void receive_staged(const Context& context, const CombineArgs& args,
                              CombineEntry* entry) {
  const int reducer = arch::warp_idx() - args.num_senders - 2;
  if (reducer >= 0) {
    StagedReducer<kDtype>(context, args, entry, reducer).run();
  } else if (reducer == -1) {
    publish_chunks(context, args, entry);
  }
}

}  // namespace deep_comm
