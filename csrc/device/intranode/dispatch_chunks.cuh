// Expanded dispatch, direct mode: tells receivers which rows have landed, so that expand_rows copies
// them while others are on their way (docs/design/0063).
//
// Moving warps take chunks of tokens and report to their block what they have taken and what has
// landed. Metadata warps write the metadata of what is taken and publish what has landed, one fence
// behind both. Where rows bring scales and a block has room for so many warps, a mover's chunks go in
// turn to two of them. Otherwise each mover has one, which may serve several.
//
// words  recv_line[chunk / 8].landed[chunk % 8] · owner: receiver · written by the metadata warp that
//        has the chunk · fence and relaxed store / acquire sys
//        recv_line[0].num_tokens, this rank's expanding · written by block 0 · relaxed, value in data
// waits  a mover for the metadata warp of its oldest chunk, which waits until a mover reports; movers
//        report before they wait
#pragma once

#include <type_traits>

#include "device/channel/landed.cuh"
#include "device/intranode/dispatch_meta.cuh"
#include "device/intranode/dispatch_output.cuh"
#include "device/intranode/final_rows.cuh"
#include "device/sync/publisher.cuh"

namespace deep_comm {

// What the moving warps of a block tell its metadata warps; in shared memory.
struct SentChunks {
  static constexpr int kMaxMovers = Progress::kMaxWords / 2;
  static constexpr uint32_t kDepth = 32;
  static constexpr int kMostPublishers = 2;  // metadata warps of a mover, at most

  Progress progress;  // [mover] chunks taken, [kMaxMovers + mover] chunks that have landed
  int chunks[kMaxMovers][kDepth];  // by a mover's own count
  // [turn][mover]: of the chunks before this one, those of that turn are published
  uint32_t num_published[kMostPublishers][kMaxMovers];

  // How many take turns with a mover's chunks.
  DC_DEVICE static uint32_t num_publishers(const DispatchArgs& args) {
    return max_of(1, args.num_meta_warps / args.num_move_warps);
  }
  // Metadata warps for num_movers, in blocks of at most num_warps.
  DC_HOST_DEVICE static int num_meta_warps(int num_movers, int num_warps) {
    const int rest = num_warps - num_movers;
    return rest >= kMostPublishers * num_movers ? kMostPublishers * num_movers
                                                : min_of(rest, num_movers);
  }
  // The whole block, before a barrier.
  DC_DEVICE void reset() {
    progress.reset();
    const int idx = arch::thread_idx();
    if (idx < kMostPublishers * kMaxMovers) num_published[idx / kMaxMovers][idx % kMaxMovers] = 0;
  }
};

// What the warps of a block share in this form; in shared memory.
struct ExpandedEntry : DispatchEntry {
  SentChunks sent;
};

// The tokens of a warp, one after the other: `Queue` deals chunks of them.
template <class Queue>
class ChunkedTokens {
 public:
  DC_DEVICE ChunkedTokens(const TokenChunks& chunks, const Queue& queue)
      : queue_(queue), chunks_(chunks) {}

  // The index-th token of this warp, or -1 after the last.
  DC_DEVICE int at(uint32_t index) {
    const int chunk = queue_.at(index >> chunks_.shift);
    const int token = chunks_.first_token(chunk) + static_cast<int>(index_in_chunk(index));
    // Nobody takes another chunk after the last one, which may have fewer tokens.
    return chunk < 0 || token >= chunks_.num_tokens ? -1 : token;
  }
  // The chunk that begins with the index-th token, or -1.
  DC_DEVICE int chunk_beginning_at(uint32_t index) {
    return index_in_chunk(index) == 0 ? queue_.at(index >> chunks_.shift) : -1;
  }
  // A chunk ends with the index-th token.
  DC_DEVICE bool ends_chunk(uint32_t index) {
    return index_in_chunk(index + 1) == 0 || at(index + 1) < 0;
  }

 private:
  DC_DEVICE uint32_t index_in_chunk(uint32_t index) const {
    return index & ((1u << chunks_.shift) - 1);
  }

  Queue queue_;
  TokenChunks chunks_;
};

// A moving warp's part. Whole warps call the methods.
class ChunkReport {
 public:
  DC_DEVICE ChunkReport(const Context& context, const DispatchArgs& args, ExpandedEntry* entry)
      : context_(context), sent_(&entry->sent), num_publishers_(SentChunks::num_publishers(args)) {}

  // The index-th token comes next: reports the chunk that begins with it, if one does. When the call
  // has failed, nobody needs the reports.
  template <class Tokens>
  DC_DEVICE void take(Tokens& tokens, uint32_t index) {
    const int chunk = tokens.chunk_beginning_at(index);
    if (chunk < 0) return;
    const int mover = arch::warp_idx();
    if (arch::lane_idx() == 0) {
      if (num_taken_ >= SentChunks::kDepth) {
        const uint32_t last = num_taken_ - SentChunks::kDepth, wanted = last + 1;
        uint32_t seen = 0;
        // pairs with: ChunkPublisher::publish — the entry has been read
        await<Scope::kCta>(
            context_, &sent_->num_published[last % num_publishers_][mover],
            {Stage::kRetire, Word::kProgress, context_.world.rank, -1}, wanted,
            [=](uint32_t value) { return value >= wanted; }, &seen);
      }
      sent_->chunks[mover][num_taken_ % SentChunks::kDepth] = chunk;
      sent_->progress.report(mover, num_taken_ + 1);
    }
    ++num_taken_;
  }

  // Every lane has stored the index-th token, after num_stores stores in all. Reports the chunks that
  // have landed. Waiting for the newest stores would empty the pipeline, so they are reported later.
  template <uint32_t kInFlight, class Tokens>
  DC_DEVICE void stored(Tokens& tokens, uint32_t index, uint32_t num_stores) {
    if (tokens.ends_chunk(index)) {
      if (static_cast<uint32_t>(arch::lane_idx()) == num_ended_ % kWarpSize) ends_ = num_stores;
      ++num_ended_;
    }
    uint32_t num_landed = num_landed_;
    while (num_landed < num_ended_ &&
           arch::shfl(kFullMask, ends_, num_landed % kWarpSize) + kInFlight <= num_stores) {
      ++num_landed;
    }
    if (num_landed == num_landed_) return;
    num_landed_ = num_landed;
    arch::bulk_wait<kInFlight>();
    arch::sync_warp();  // the stores of all lanes, before the leader's report
    if (arch::lane_idx() == 0) {
      sent_->progress.report(SentChunks::kMaxMovers + arch::warp_idx(), num_landed);
    }
  }

  // Last, when every lane's stores have landed.
  DC_DEVICE void finish() {
    arch::sync_warp();  // the stores of all lanes, before the leader's report
    if (arch::lane_idx() == 0) {
      sent_->progress.finish(SentChunks::kMaxMovers + arch::warp_idx(), num_ended_);
    }
  }

 private:
  const Context& context_;
  SentChunks* sent_;
  uint32_t num_publishers_;
  uint32_t num_taken_ = 0;
  uint32_t num_ended_ = 0;
  uint32_t num_landed_ = 0;
  uint32_t ends_ = 0;  // lane i: stores up to the end of the last chunk whose index is i modulo 32
};

// Other forms report nothing.
struct NoReport {
  DC_DEVICE NoReport(const Context&, const DispatchArgs&, DispatchEntry*) {}
  template <class Tokens>
  DC_DEVICE void take(Tokens&, uint32_t) {}
  template <uint32_t kInFlight, class Tokens>
  DC_DEVICE void stored(Tokens&, uint32_t, uint32_t) {}
  DC_DEVICE void finish() {}
};

// What a mover of this form deals in, and whom it tells.
template <class Form>
struct Moved {
  using Entry = std::conditional_t<Form::kExpanded, ExpandedEntry, DispatchEntry>;
  using Report = std::conditional_t<Form::kExpanded, ChunkReport, NoReport>;
  template <class Queue>
  using Tokens = std::conditional_t<Form::kExpanded, ChunkedTokens<Queue>, Queue>;

  DC_DEVICE static int num_items(const DispatchArgs& args) {
    if constexpr (Form::kExpanded) return TokenChunks::of(args.num_tokens).num_chunks();
    return args.num_tokens;
  }
  // queue: of num_items.
  template <class Queue>
  DC_DEVICE static Tokens<Queue> tokens(const DispatchArgs& args, const Queue& queue) {
    if constexpr (Form::kExpanded) {
      return {TokenChunks::of(args.num_tokens), queue};
    } else {
      return queue;
    }
  }
};

// Warp 0 of block 0, when the mode is known: tells this rank's expand_rows, and those of the peers
// how many chunks will come from here.
DC_DEVICE void announce_expanding(const Context& context, const DispatchArgs& args,
                                  DispatchMode mode) {
  const World& world = args.world;
  const int peer = arch::lane_idx();
  if (mode == DispatchMode::kDirect && world.takes_part(peer)) {
    // pairs with: find_arriving at the peer — nothing but the word itself
    arch::st_relaxed_sys(&world.recv_line(peer, 0, world.rank)->num_tokens,
                         Tagged::pack(context.generation, args.num_tokens));
  }
  if (peer == 0) {
    // pairs with: find_arriving — nothing but the word itself
    arch::st_relaxed_sys(&world.state()->expanding,
                         Tagged::pack(context.generation, static_cast<uint32_t>(mode)));
  }
}

// A metadata warp: number `warp` of num_meta_warps. If these are a multiple of the movers, it takes turns
// with the mover's others. If they are fewer, it serves movers warp, warp + num_meta_warps, …, one per
// lane.
template <class Form>
class ChunkPublisher {
 public:
  DC_DEVICE ChunkPublisher(const Context& context, const DispatchArgs& args,
                           const PeerOutput* outputs, SentChunks* sent, int warp)
      : context_(context),
        args_(args),
        outputs_(outputs),
        sent_(sent),
        chunks_(TokenChunks::of(args.num_tokens)),
        ordinals_(args, arch::lane_idx() % args.world.num_ranks),
        first_rows_(args, arch::lane_idx() % args.world.num_ranks),
        num_publishers_(SentChunks::num_publishers(args)),
        turn_(warp / args.num_move_warps),
        first_mover_(warp % args.num_move_warps),
        mover_(mover_of(arch::lane_idx())),
        has_mover_(mover_ < args.num_move_warps && turn_ < num_publishers_) {}

  // Returns when its movers have finished and all that they have sent is published.
  DC_DEVICE void run() {
    while (true) {
      // Reads the bell before any lane reads its words: a later report rings again.
      const uint32_t rung = arch::ld_acquire_cta(&sent_->progress.bell);
      arch::sync_warp();
      // pairs with: ChunkReport::take — the entries
      if (has_mover_) num_taken_ = arch::ld_acquire_cta(&sent_->progress.words[mover_]);
      // Relaxed: with the fence of publish an acquire.
      uint32_t word = Progress::kFinished;
      if (has_mover_) {
        word = arch::ld_relaxed_cta(&sent_->progress.words[SentChunks::kMaxMovers + mover_]);
      }
      write_metadata();
      const uint32_t num_landed = arch::fault(Fault::kEarlyLanded)
                                      ? num_written_
                                      : min_of(word & ~Progress::kFinished, num_written_);
      if (arch::any(kFullMask, own_from(num_published_) < num_landed)) publish(num_landed);
      const bool is_finished = (word & Progress::kFinished) != 0 &&
                               own_from(num_published_) >= (word & ~Progress::kFinished);
      if (arch::all(kFullMask, is_finished)) return;
      if (!await_bell(context_, &sent_->progress.bell, rung)) return;
    }
  }

 private:
  // Lane i's mover.
  DC_DEVICE int mover_of(int lane) const { return first_mover_ + lane * args_.num_meta_warps; }
  // The first of a mover's chunks from `idx` on that falls to this warp.
  DC_DEVICE uint32_t own_from(uint32_t idx) const {
    return idx + (turn_ + num_publishers_ - idx % num_publishers_) % num_publishers_;
  }

  // Of the chunks that the movers have taken.
  DC_DEVICE void write_metadata() {
    arch::sync_warp();  // hands each lane's acquire to all lanes, which read its mover's entries
    uint32_t behind = arch::ballot(kFullMask, num_written_ != num_taken_);
    for (; behind != 0; behind &= behind - 1) {
      const int lane = arch::ffs(behind) - 1;
      const uint32_t end = arch::shfl(kFullMask, num_taken_, lane);
      uint32_t idx = own_from(arch::shfl(kFullMask, num_written_, lane));
      for (; idx < end; idx += num_publishers_) {
        write_metadata(sent_->chunks[mover_of(lane)][idx % SentChunks::kDepth]);
      }
    }
    num_written_ = num_taken_;
  }

  DC_DEVICE void write_metadata(int chunk) {
    // There is none. Casting movers write the scales that they make.
    if (args_.message.num_topk == 0 && (Form::kQuantised || args_.num_scales == 0)) return;
    constexpr ScaleSource kScales = Form::kQuantised ? ScaleSource::kNone : ScaleSource::kInput;
    for (int token = chunks_.first_token(chunk); token < chunks_.end_token(chunk); ++token) {
      ExpandedMeta<kScales> meta;
      ordinals_.look_up(token);
      first_rows_.look_up(token);
      meta.load(args_, token);
      for (int peer = 0; peer < args_.world.num_ranks; ++peer) {
        const int64_t ordinal = arch::shfl(kFullMask, ordinals_.row(), peer);
        const int64_t row = arch::shfl(kFullMask, first_rows_.row(), peer);
        const PeerOutput& output = outputs_[peer];
        if (ordinal < 0 || ordinal >= output.num_rows) continue;
        meta.store(args_, token, peer, output, ordinal, row);
      }
    }
  }

  // Lane i: the chunks of its mover before num_landed.
  DC_DEVICE void publish(uint32_t num_landed) {
    arch::sync_warp();  // the metadata that the lanes have written
    // pairs with: ChunkReport::stored, ::finish — the chunks' rows.
    // With the stores below, a release; pairs with: await_landed at the peer — the chunks' rows and
    // their metadata
    arch::fence_acq_rel_sys();
    const int num_ranks = args_.world.num_ranks;
    const int peer = arch::lane_idx() % num_ranks, place = arch::lane_idx() / num_ranks;
    const int num_places = kWarpSize / num_ranks;
    const bool tells_peer = place < num_places && !args_.world.is_absent(peer);
    uint32_t landed = arch::ballot(kFullMask, num_landed != num_published_);
    for (; landed != 0; landed &= landed - 1) {
      const int lane = arch::ffs(landed) - 1;
      const uint32_t end = arch::shfl(kFullMask, num_landed, lane);
      uint32_t idx =
          own_from(arch::shfl(kFullMask, num_published_, lane)) + place * num_publishers_;
      for (; tells_peer && idx < end; idx += num_places * num_publishers_) {
        const int chunk = sent_->chunks[mover_of(lane)][idx % SentChunks::kDepth];
        arch::st_relaxed_sys(landed_word(args_.world, peer, args_.world.rank, chunk),
                             Tagged::pack(context_.generation, rows_of(chunk).pack()));
      }
    }
    num_published_ = num_landed;
    arch::sync_warp();  // all lanes have read the entries
    // pairs with: ChunkReport::take — the entries have been read
    if (has_mover_) arch::st_release_cta(&sent_->num_published[turn_][mover_], num_published_);
  }

  // At this lane's peer.
  DC_DEVICE LandedRows rows_of(int chunk) {
    LandedRows landed{0, 0};
    for (int token = chunks_.first_token(chunk); token < chunks_.end_token(chunk); ++token) {
      ordinals_.look_up(token);
      if (ordinals_.row() < 0) continue;
      if (landed.count == 0) landed.first = static_cast<uint32_t>(ordinals_.row_of_rank());
      ++landed.count;
    }
    return landed;
  }

  const Context& context_;
  const DispatchArgs& args_;
  const PeerOutput* outputs_;
  SentChunks* sent_;
  TokenChunks chunks_;
  FinalRows ordinals_;  // at rank lane % R; with lanes from 0 on, every rank has one of the first
  FirstRows first_rows_;
  uint32_t num_publishers_;  // with this one
  uint32_t turn_;            // among them
  int first_mover_;
  int mover_;  // this lane's
  bool has_mover_;
  uint32_t num_taken_ = 0;      // by this lane's mover
  uint32_t num_written_ = 0;    // of them, whose metadata is written as far as it is this warp's
  uint32_t num_published_ = 0;  // of them
};

}  // namespace deep_comm
