// combine, staged mode: every row has a slot of its own at the rank it returns to. So nobody waits
// for credit, and any block may send any chunk of rows and add any token.
//
// grid   any number of blocks; the num_staged_senders sending warps of all blocks take chunks, one
//        warp per block publishes them, one takes tokens, the last ones add them
//        (combine_watch.cuh). Chunks and tokens are taken in ascending order
// words  recv_line[chunk / 8].landed[chunk % 8] · owner: receiver · written by the sender's
//        block · fence and relaxed store / acquire sys
//        taken · this rank · see sync/generation.cuh
// waits  landed: unblocked by the sender of the chunk, which waits only for its own publisher,
//        which waits only until a sender rings; senders ring before they wait
//        of an expanded output: by combine_sums, whose publisher waits for the other warps of its
//        block alone, and these for nothing after the entry
#pragma once

#include "device/intranode/combine_watch.cuh"
#include "device/intranode/ring_send.cuh"
#include "device/sync/generation.cuh"
#include "device/sync/work_queue.cuh"

namespace deep_comm {

// What the senders of a block send, and how it is published.
class ChunksToRanks : public ReturnedChunks<false> {
 public:
  DC_DEVICE ChunksToRanks(const Context& context, const CombineArgs& args,
                          const CombineEntry* entry)
      : ReturnedChunks(args), context_(context), args_(args), entry_(entry) {}

  // The warp's first chunk is its own.
  static DC_DEVICE AskedQueue<ChunksToRanks> ask(const Context& context, const CombineArgs& args,
                                                 const CombineEntry* entry) {
    const int first = arch::warp_idx() * arch::num_blocks() + arch::block_idx();
    return {ChunksToRanks(context, args, entry), taken_work(context)->num_chunks,
            static_cast<uint32_t>(first), static_cast<uint32_t>(args.num_staged_senders)};
  }

  DC_DEVICE uint8_t* slots(const Chunk& chunk) const {
    return entry_->start.places[chunk.peer] +
           static_cast<size_t>(chunk.first) * args_.message.slot_bytes();
  }
  DC_DEVICE StoresLeft stores_left(uint32_t) const { return StoresLeft::of_stored(false); }
  DC_DEVICE bool can_publish() const { return true; }
  DC_DEVICE void publish(int item) const { publish_chunk(context_, args_, item); }

  // One lane, after a fence.
  DC_DEVICE static void publish_chunk(const Context& context, const CombineArgs& args, int item) {
    const World& world = args.world;
    // With the fence, a release; pairs with: TokenWatch::look — the chunk's rows
    arch::st_relaxed_sys(landed_word(world, item / kMaxChunks, world.rank, item % kMaxChunks),
                         Tagged::pack(context.generation, 1));
  }

 private:
  const Context& context_;
  const CombineArgs& args_;
  const CombineEntry* entry_;
};

// Staged mode, the warps of a block that do not send.
template <Dtype kDtype, bool kIsExpanded>
DC_DEVICE void receive_staged(const Context& context, const CombineArgs& args,
                              CombineEntry* entry) {
  const int reducer = arch::warp_idx() - args.num_senders - 2;
  if (reducer >= 0) {
    add_ready<kDtype>(context, args, entry, reducer);
  } else if (reducer == -1) {
    if constexpr (kIsExpanded) return;
    publish_landed(context, entry->progress, entry->landed, args.num_senders, [&](int item) {
      if (item >= 0) ChunksToRanks::publish_chunk(context, args, item);
    });
  } else {
    TokenWatch<kIsExpanded>(context, args, entry).run();
  }
}

}  // namespace deep_comm
