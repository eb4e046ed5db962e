// combine, staged mode, what the warps send that move rows of x as they are.
//
// Several ranks per node: every row goes to its slot at the local rank that forwarded it. Those that
// cross to other nodes come first, the nodes in rotation, so that all of them get sums from the
// start. Those of this node's own tokens follow.
//
// One rank per node: a row is its node's whole sum. It goes to its slot at the owner's node, and
// there is nothing to add before that. The bits are those of a sum of one row: rounding it would
// only make 0 of -0, and the owner's sum, which begins with 0, does so too.
#pragma once

#include "device/internode/combine_forward_order.cuh"
#include "device/internode/combine_staging.cuh"
#include "device/move/row_sender.cuh"

namespace deep_comm {

// For a RowSender, with several ranks per node: the rows of x that return to the node's other ranks,
// the ranks in rotation.
class ChunksInNode {
 public:
  static constexpr int kEnd = -1, kNone = -2;
  static constexpr bool kCrosses = false;

  DC_DEVICE ChunksInNode(const TierContexts& contexts, const InternodeCombineArgs& args,
                         const StagedEntry* entry)
      : contexts_(contexts),
        args_(args),
        entry_(entry),
        num_peers_(args.world.num_ranks - 1),
        by_peers_(Divisor::make(num_peers_)),
        by_others_(Divisor::make(max_of(args.tiers.num_nodes() - 1, 1))) {
    DC_NO_UNROLL
    for (int peer = 0; peer <= num_peers_; ++peer) {
      if (peer == args.world.rank) continue;
      most_chunks_ = max_of(most_chunks_, entry->tables.num_returned[peer]);
    }
  }

  static DC_DEVICE AskedQueue<ChunksInNode> ask(const TierContexts& contexts,
                                                const InternodeCombineArgs& args,
                                                const StagedEntry* entry) {
    return {ChunksInNode(contexts, args, entry), &taken_work(contexts.node)->num_chunks[0]};
  }

  // The rotation advances with each round. Otherwise all ranks would begin a round with the same
  // peer. Chunks that cross come first, by rounds over the other nodes.
  DC_DEVICE int at(uint32_t number) const {
    const int index = by_peers_.quotient(static_cast<int>(number));
    if (index >= most_chunks_) return kEnd;
    const int turn = static_cast<int>(number) - index * num_peers_;
    int peer = args_.world.rank + 1 + turn + index - by_peers_.quotient(turn + index) * num_peers_;
    if (peer > num_peers_) peer -= num_peers_ + 1;
    const StagedTables& tables = entry_->tables;
    const int num_others = args_.tiers.num_nodes() - 1, num_crossing = tables.num_crossing[peer];
    if (index >= tables.num_returned[peer]) return kNone;
    int node = args_.tiers.rail.node, round = index - num_crossing;
    if (round < 0) {
      round = by_others_.quotient(index);
      node += 1 + index - round * num_others;
      if (node > num_others) node -= num_others + 1;
    }
    const int shift = tables.returned_chunks[peer].shift;
    const int begin = tables.returned[peer][node], end = tables.returned[peer][node + 1];
    const int slice = (begin >> shift) + round;
    const bool has_rows = max_of(begin, slice << shift) < end;
    return has_rows ? (peer << kNodeBits | node) << kSliceBits | slice : kNone;
  }
  DC_DEVICE Chunk chunk(int item) const {
    if (item < 0) return {-1, -1, 0, 0, 0};
    const int slice = item & ((1 << kSliceBits) - 1);
    const int node = item >> kSliceBits & ((1 << kNodeBits) - 1);
    const int peer = item >> (kSliceBits + kNodeBits);
    const StagedTables& tables = entry_->tables;
    const int shift = tables.returned_chunks[peer].shift;
    const int begin = tables.returned[peer][node], end = tables.returned[peer][node + 1];
    const int first = max_of(begin, slice << shift);
    return {peer * kMaxChunks + slice + node, peer, first,
            min_of(end, (slice + 1) << shift) - first,
            static_cast<int64_t>(tables.x_starts[peer][node]) + first - begin};
  }
  DC_DEVICE uint8_t* slots(const Chunk& chunk) const {
    return entry_->rank_slots[chunk.peer] +
           static_cast<size_t>(chunk.first) * args_.message.slot_bytes();
  }
  // The next hop may be a put.
  DC_DEVICE StoresLeft stores_left(uint32_t num_chunks) const {
    return StoresLeft::behind(num_chunks);
  }
  DC_DEVICE bool can_publish() const { return true; }
  DC_DEVICE void publish(int item) const { publish_chunk(contexts_.node, chunk(item).item); }

  // One lane, after a fence.
  DC_DEVICE static void publish_chunk(const Context& node, int item) {
    // With the fence, a release; pairs with: LocalRows::await_row — the chunk's rows
    arch::st_relaxed_sys(
        landed_word(node.world, item / kMaxChunks, node.world.rank, item % kMaxChunks),
        Tagged::pack(node.generation, 1));
  }

 private:
  // An item: peer, node, and which chunk of the peer's rows it is, borders between nodes aside.
  static constexpr int kNodeBits = 5, kSliceBits = 16;
  static_assert(kMaxChunks <= 1 << kSliceBits && kMaxStagedNodes <= 1 << kNodeBits);

  const TierContexts& contexts_;
  const InternodeCombineArgs& args_;
  const StagedEntry* entry_;
  int num_peers_;
  Divisor by_peers_;
  Divisor by_others_;
  int most_chunks_ = 0;  // of any peer
};

// The same with one rank per node: the rows of x that came from a node lie in the order of their
// slots there.
class ChunksToNodes {
 public:
  static constexpr int kEnd = ForwardedRuns::kEnd, kNone = ForwardedRuns::kNone;
  static constexpr bool kCrosses = true;

  DC_DEVICE ChunksToNodes(const TierContexts& contexts, const InternodeCombineArgs& args,
                          const StagedEntry* entry)
      : contexts_(contexts), args_(args), entry_(entry), runs_(args, entry->tables) {}

  static DC_DEVICE AskedQueue<ChunksToNodes> ask(const TierContexts& contexts,
                                                 const InternodeCombineArgs& args,
                                                 const StagedEntry* entry) {
    return {ChunksToNodes(contexts, args, entry), ForwardedRuns::counter(contexts.node)};
  }

  DC_DEVICE int at(uint32_t number) const { return runs_.at(number); }
  DC_DEVICE Chunk chunk(int item) const {
    const ForwardedRuns::Run run = runs_.run(item);
    if (run.node < 0) return {-1, -1, 0, 0, 0};
    return {SumItem::pack(run.node, run.chunk), run.node, run.first, run.num_rows,
            static_cast<int64_t>(entry_->tables.x_starts[0][run.node]) + run.first};
  }
  DC_DEVICE uint8_t* slots(const Chunk& chunk) const {
    return entry_->node_slots[chunk.peer] +
           static_cast<size_t>(chunk.first) * args_.message.slot_bytes();
  }
  DC_DEVICE StoresLeft stores_left(uint32_t num_chunks) const {
    return can_publish() ? StoresLeft::of_stored(false) : StoresLeft::behind(num_chunks);
  }
  // Puts are the publisher's.
  DC_DEVICE bool can_publish() const { return args_.tiers.rail.are_all_near; }
  DC_DEVICE void publish(int item) const {
    const ForwardedRuns::Run run = runs_.run(item);
    publish_stored_sums(contexts_.rail, args_, SumItem(SumItem::pack(run.node, run.chunk)),
                        run.num_rows, near_segment(args_.world, args_.tiers.rail, run.node));
  }

 private:
  const TierContexts& contexts_;
  const InternodeCombineArgs& args_;
  const StagedEntry* entry_;
  ForwardedRuns runs_;
};

}  // namespace deep_comm
