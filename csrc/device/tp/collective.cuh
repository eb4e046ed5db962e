// all_gather, reduce_scatter, all_reduce, all_reduce_norm: a rank pushes its input into its peers'
// stagings, and takes from its own what they have pushed.
//
// in     x [num_bytes]: shards of shard_bytes, of R ranks or one; the same on all ranks
// out    see CollectiveArgs
// grid   num_push_blocks blocks push, those from first_take_block on reduce or gather; a lone block does
//        both. A shard has parts of part_vecs vectors. They are dealt to blocks, then to their warps: part k
//        is the k / B-th of block k % B of B. Warp 0 of a block watches the entry and publishes
// smem   some pieces of a part for each warp that pushes; then a CollectiveEntry
// words  Tagged, written by this rank into each peer's memory, read there
//          recv_line[push block].tail   its first parts have been pushed      release / acquire
//          recv_line[take block].done   sums of its first parts, too          release / acquire
//          arrived                      operation entered, as at the entry of every kernel
// before pushes: all peers have entered. So they have left their earlier operations, and nobody reads
//        the staging any more, be it of a collective or of a product
// after  on this rank's stream: out; nobody pushes into this rank's staging, or reads from it
// waits  end when every rank has launched the same operation: pushing warps wait for the entry alone
//
// Few blocks fill the links. Where every block pushed, with 48 SMs and more, both pushes and copies took
// longer: see docs/design/0064.
//
// Sums are taken in float32 in rank order and rounded once, so that all ranks and runs have the same.
//
// With kMulticast an NVLink switch takes the sums, in float32 in an order that nobody specifies. Each
// rank pushes all its shards into its own staging only, and waits for its own `tail` as well. In two
// shots the rank that adds a shard sends each sum to every staging by one store, over what was added,
// and every rank loads the sums from its own staging.
// * That store comes after this rank has seen every rank's `tail` of this part. This rank alone reads
//   the vectors that it overwrites, and the thread that overwrites them has read them.
// * It ends before anybody's next use of that staging: every rank waits for all `done` before it leaves.
// * A switch is reached by another address than a rank's own memory. PTX orders accesses by different
//   addresses only if a proxy fence of aliases stands on the way from one to the other (PTX ISA,
//   "Proxies" and "Causality Order"). It stands before each report to the publishing warp. From launch
//   to launch none is needed.
// * all_gather has no such form: it has nothing to add.
#pragma once

#include "device/move/parts.cuh"
#include "device/sync/barrier.cuh"
#include "device/sync/generation.cuh"
#include "device/sync/publisher.cuh"
#include "device/tp/norm.cuh"

namespace deep_comm {

template <Collective kOp>
struct CollectiveForm {
  static constexpr bool kHasShards =
      kOp != Collective::kAllGather && kOp != Collective::kAllReduceOnce;
  static constexpr bool kNorms = kOp == Collective::kAllReduceNorm;
  static constexpr bool kReduces = kOp != Collective::kAllGather;
  static constexpr bool kSpreadsSums = spreads_sums(kOp);
  static constexpr bool kGathers = kOp == Collective::kAllGather || kSpreadsSums;
  static constexpr Kernel kKernel = kOp == Collective::kAllGather       ? Kernel::kAllGather
                                    : kOp == Collective::kReduceScatter ? Kernel::kReduceScatter
                                                                        : Kernel::kAllReduce;
};

inline constexpr int kEnteredBarrier = 1;

// In shared memory.
struct CollectiveEntry {
  Progress progress;  // of the warps that push, then of those that reduce: see PiecePusher
  bool has_entered;   // so have all peers
};

// One warp of a team: of those that do the same in their blocks.
struct PartTaker {
  int block;  // of num_blocks
  int num_blocks;
  int warp;  // of num_warps of the block
  int num_warps;

  DC_DEVICE int first() const { return warp * num_blocks + block; }
  DC_DEVICE int step() const { return num_warps * num_blocks; }
};

// What the teams share.
struct CollectiveCall {
  const CollectiveArgs& args;
  const Context& context;
  CollectiveEntry* entry;

  DC_DEVICE const World& world() const { return args.world; }
  DC_DEVICE Vec16* staged(int rank, int slot) const {
    return reinterpret_cast<Vec16*>(world().bases[rank] + args.staging) + slot * args.shard_vecs;
  }
  // Vector v of the slot in every rank's staging.
  DC_DEVICE Multicast staged_everywhere(int slot, int64_t v) const {
    return {args.multicast, world().bases, world().num_ranks,
            args.staging + (slot * args.shard_vecs + v) * sizeof(Vec16)};
  }
  DC_DEVICE int64_t bytes_of(int shard) const {
    const int64_t rest = args.num_bytes - shard * args.shard_bytes;
    return max_of<int64_t>(0, min_of(rest, args.shard_bytes));
  }
  // As far as the shard has bytes.
  DC_DEVICE VecRange part(int idx, int shard) const {
    const int64_t end = ceil_div<int64_t>(bytes_of(shard), sizeof(Vec16));
    const int64_t first = min_of(idx * args.part_vecs, end);
    return {first, min_of(first + args.part_vecs, end)};
  }
  // Calls visit with the pieces of a part; once, if it is empty.
  template <class Visit>
  DC_DEVICE void for_pieces(const VecRange& part, const Visit& visit) const {
    int64_t begin = part.first;
    do {
      const int64_t end = min_of(begin + args.piece_vecs, part.end);
      visit(VecRange{begin, end});
      begin = end;
    } while (begin < part.end);
  }
  // Calls visit with the first vector of each row of a part, which has whole rows.
  template <class Visit>
  DC_DEVICE void for_rows(const VecRange& part, const Visit& visit) const {
    for (int64_t first = part.first; first < part.end; first += args.norm.row_vecs) visit(first);
  }
  DC_DEVICE uint8_t* normed(int shard, int64_t first) const {
    return args.norm.normed + shard * args.shard_bytes + first * sizeof(Vec16);
  }
};

// The pieces of a pushing warp in shared memory, which its lanes fill and bulk stores empty, and what
// has landed of its parts: a report says before which part of the block all of this warp's have.
class PiecePusher {
 public:
  static constexpr int kNumRooms = 3;

  // word: of `progress`, and the warp's number among the block's that push.
  DC_DEVICE PiecePusher(const CollectiveCall& call, const PartTaker& taker, int word)
      : progress_(call.entry->progress),
        rooms_(reinterpret_cast<Vec16*>(arch::dynamic_smem()) +
               kNumRooms * word * call.args.piece_vecs),
        piece_vecs_(call.args.piece_vecs),
        taker_(taker),
        word_(word) {}

  // The whole warp: room for a piece.
  DC_DEVICE Vec16* room() const {
    if (arch::lane_idx() == 0) arch::bulk_wait_read<kNumRooms - 1>();
    arch::sync_warp();
    return rooms_ + turn_ * piece_vecs_;
  }
  // The whole warp, after its lanes have filled the room with num_vecs vectors: stores them to
  // dst(rank) of each rank that takes them.
  template <class Takes, class Dst>
  DC_DEVICE void push(int64_t num_vecs, int num_ranks, const Takes& takes, const Dst& dst) {
    arch::fence_proxy_async_shared();
    arch::sync_warp();
    if (arch::lane_idx() == 0) {
      for (int rank = 0; rank < num_ranks && num_vecs > 0; ++rank) {
        if (!takes(rank)) continue;
        arch::bulk_store(dst(rank), rooms_ + turn_ * piece_vecs_,
                         static_cast<uint32_t>(num_vecs * sizeof(Vec16)));
      }
      arch::bulk_commit();
    }
    if (++turn_ == kNumRooms) turn_ = 0;
  }
  // The whole warp, after a part. To wait for its newest pieces would hold up the next ones.
  template <bool kMulticast>
  DC_DEVICE void after_part() {
    constexpr int kInFlight = kNumRooms - 1;
    ++num_parts_;
    // Lanes may have stored by themselves, through the switch. And a row of sums in the output is
    // normalised after this by lanes that have not stored it.
    arch::sync_warp();
    if (arch::lane_idx() != 0 || num_parts_ <= kInFlight) return;
    arch::bulk_wait<kInFlight>();
    // What was stored by one of the two addresses is loaded by the other.
    if constexpr (kMulticast) arch::fence_proxy_alias();
    progress_.report(word_, first_without(num_parts_ - kInFlight));
  }
  // The last report, also of a warp that has failed.
  template <bool kMulticast>
  DC_DEVICE void finish() {
    if (arch::lane_idx() != 0) return;
    arch::bulk_wait<0>();
    if constexpr (kMulticast) arch::fence_proxy_alias();
    progress_.finish(word_, first_without(num_parts_));
  }

 private:
  // The block's part that is this warp's next after num_parts.
  DC_DEVICE uint32_t first_without(int num_parts) const {
    return static_cast<uint32_t>(num_parts * taker_.num_warps + taker_.warp);
  }

  Progress& progress_;
  Vec16* rooms_;
  int64_t piece_vecs_;
  PartTaker taker_;
  int word_;
  int turn_ = 0;
  int num_parts_ = 0;
};

// The whole warp: waits until every peer has published part idx, or with kOfSums its sums. One of
// num_blocks there has pushed it. The result is uniform.
//   unblocked by: publish_parts of that block at every peer, and with kOfAll at this rank
//   patience: a peer pushes when its own peers have entered, and adds when they have pushed. So a rank
//             that does not come is named by those who wait for its entry
template <bool kOfSums, bool kOfAll>
DC_DEVICE bool await_part(const CollectiveCall& call, int idx, int num_blocks) {
  constexpr uint64_t kPatience = kOfSums ? 3 : 2;
  constexpr Stage kStage = kOfSums ? Stage::kSummed : Stage::kStaged;
  constexpr Word kWord = kOfSums ? Word::kSummed : Word::kStaged;
  const World& world = call.world();
  if (world.num_ranks == 1) return true;
  const int peer = arch::lane_idx(), block = idx % num_blocks;
  bool ok = true;
  if (peer < world.num_ranks && (kOfAll || peer != world.rank)) {
    const uint32_t wanted = static_cast<uint32_t>(idx / num_blocks) + 1;
    const RecvLine* line = world.recv_line(world.rank, block, peer);
    uint32_t num_published = 0;
    ok = await_tagged(call.context, kOfSums ? &line->done : &line->tail,
                      {kStage, kWord, peer, block}, wanted, &num_published, kPatience);
  }
  // The barrier hands each lane's acquire to the whole warp.
  arch::sync_warp();
  return arch::all(kFullMask, ok);
}

template <Collective kOp, bool kMulticast>
DC_DEVICE void push_parts(const CollectiveCall& call, const PartTaker& taker) {
  constexpr bool kHasShards = CollectiveForm<kOp>::kHasShards;
  const CollectiveArgs& args = call.args;
  const World& world = call.world();
  PiecePusher pusher(call, taker, taker.warp);
  arch::sync_named(kEnteredBarrier, (1 + taker.num_warps) * kWarpSize);
  const int num_parts = call.entry->has_entered ? args.num_parts : 0;
  const int first_turn = kHasShards && !kMulticast ? 1 : 0;
  const int num_turns = kHasShards ? world.num_ranks : 1;
  for (int idx = taker.first(); idx < num_parts; idx += taker.step()) {
    for (int turn = first_turn; turn < num_turns; ++turn) {
      const int shard = kHasShards ? (world.rank + turn) % world.num_ranks : 0;
      const uint8_t* src = args.x + shard * args.shard_bytes;
      const int64_t num_bytes = call.bytes_of(shard);
      call.for_pieces(call.part(idx, shard), [&](const VecRange& piece) {
        Vec16* room = pusher.room();
        copy_range<8>(
            Team::alone(), piece, [&](int64_t v) { return load_input(src, num_bytes, v); },
            [&](int64_t v, const Vec16& vec) { room[v - piece.first] = vec; });
        pusher.push(
            piece.end - piece.first, world.num_ranks,
            [&](int rank) {
              if constexpr (kMulticast) return rank == world.rank;
              return kHasShards ? rank == shard : rank != world.rank;
            },
            [&](int rank) {
              return call.staged(rank, kMulticast ? shard : world.rank) + piece.first;
            });
      });
    }
    pusher.after_part<kMulticast>();
  }
  pusher.finish<kMulticast>();
}

// word: this warp's among the block's that push.
template <Collective kOp, Dtype kDtype, bool kMulticast>
DC_DEVICE void reduce_parts(const CollectiveCall& call, const PartTaker& taker, int word) {
  using Form = CollectiveForm<kOp>;
  constexpr bool kPushes = Form::kSpreadsSums && !kMulticast;
  const CollectiveArgs& args = call.args;
  const World& world = call.world();
  const int shard = Form::kHasShards ? world.rank : 0;
  const uint8_t* x = args.x + shard * args.shard_bytes;
  uint8_t* out = args.out + (Form::kSpreadsSums ? shard * args.shard_bytes : 0);
  const int64_t num_bytes = call.bytes_of(shard);
  PiecePusher pusher(call, taker, word);
  for (int idx = taker.first(); idx < args.num_parts; idx += taker.step()) {
    const VecRange part = call.part(idx, shard);
    if (!await_part<false, kMulticast>(call, idx, args.num_push_blocks)) break;
    call.for_pieces(part, [&](const VecRange& piece) {
      Vec16* room = kPushes ? pusher.room() : nullptr;
      const auto store = [&](int64_t v, Vec16 sum) {
        if constexpr (Form::kNorms) {
          const uint8_t* residual = args.norm.residual + shard * args.shard_bytes;
          sum = add_vecs<kDtype>(sum, load_input(residual, num_bytes, v));
        }
        store_output(out, num_bytes, v, sum);
        if constexpr (kPushes) {
          room[v - piece.first] = sum;
        } else if constexpr (Form::kSpreadsSums) {
          arch::multimem_st_relaxed_sys(call.staged_everywhere(shard, v), sum);
        }
      };
      if constexpr (kMulticast) {
        copy_range(
            Team::alone(), piece,
            [&](int64_t v) {
              return arch::multimem_add_relaxed_sys<typename Numeric<kDtype>::Element>(
                  call.staged_everywhere(shard, v));
            },
            store);
      } else {
        add_range<kDtype>(
            Team::alone(), piece, world.num_ranks,
            [&](int rank, int64_t v) {
              if (rank == world.rank) return load_input(x, num_bytes, v);
              return arch::ld_weak(call.staged(world.rank, rank) + v);
            },
            store);
      }
      if constexpr (kPushes) {
        pusher.push(
            piece.end - piece.first, world.num_ranks, [&](int rank) { return rank != world.rank; },
            [&](int rank) {
              return call.staged(rank, world.num_ranks + world.rank) + piece.first;
            });
      }
    });
    if constexpr (Form::kSpreadsSums) pusher.template after_part<kMulticast>();
    if constexpr (Form::kNorms) {
      const Vec16* rows = reinterpret_cast<const Vec16*>(out);
      const auto load = [&](int64_t first) {
        return [=](int64_t v) { return arch::ld_weak(rows + first + v); };
      };
      call.for_rows(part, [&](int64_t first) {
        normalise_row<kDtype>(args.norm, call.normed(shard, first), load(first), load(first));
      });
    }
  }
  if constexpr (Form::kSpreadsSums) pusher.template finish<kMulticast>();
}

template <Collective kOp, Dtype kDtype, bool kMulticast>
DC_DEVICE void gather_parts(const CollectiveCall& call, const PartTaker& taker) {
  constexpr bool kOfSums = CollectiveForm<kOp>::kSpreadsSums;
  const CollectiveArgs& args = call.args;
  const World& world = call.world();
  for (int idx = taker.first(); idx < args.num_parts; idx += taker.step()) {
    if constexpr (!kOfSums) {
      uint8_t* out = args.out + world.rank * args.num_bytes;
      copy_range<8>(
          Team::alone(), call.part(idx, 0),
          [&](int64_t v) { return load_input(args.x, args.num_bytes, v); },
          [&](int64_t v, const Vec16& vec) { store_output(out, args.num_bytes, v, vec); });
    }
    const int num_blocks = kOfSums ? taker.num_blocks : args.num_push_blocks;
    if (!await_part<kOfSums, false>(call, idx, num_blocks)) return;
    for (int turn = 1; turn < world.num_ranks; ++turn) {
      const int peer = (world.rank + turn) % world.num_ranks;
      const VecRange part = call.part(idx, kOfSums ? peer : 0);
      const Vec16* src =
          call.staged(world.rank, kOfSums && !kMulticast ? world.num_ranks + peer : peer);
      uint8_t* out = args.out + peer * args.shard_bytes;
      const int64_t num_bytes = kOfSums ? call.bytes_of(peer) : args.num_bytes;
      if constexpr (CollectiveForm<kOp>::kNorms) {
        call.for_rows(part, [&](int64_t first) {
          Vec16* row = reinterpret_cast<Vec16*>(out) + first;
          normalise_row<kDtype>(
              args.norm, call.normed(peer, first),
              [&](int64_t v) {
                const Vec16 vec = arch::ld_weak(src + first + v);
                arch::st_weak(row + v, vec);
                return vec;
              },
              [&](int64_t v) { return arch::ld_weak(row + v); });
        });
      } else {
        copy_range<8>(
            Team::alone(), part, [&](int64_t v) { return arch::ld_weak(src + v); },
            [&](int64_t v, const Vec16& vec) { store_output(out, num_bytes, v, vec); });
      }
    }
  }
}

// Warp 0 of a block that pushes.
DC_DEVICE void enter(const CollectiveCall& call) {
  const bool has_entered =
      await_all_entered(call.context, Stage::kEntryBarrier, call.args.signature);
  if (has_entered) note_in_warp(call.context, TraceStep::kEntered);
  if (arch::lane_idx() == 0) call.entry->has_entered = has_entered;
  arch::sync_named(kEnteredBarrier, (1 + call.args.roles.num_push_warps) * kWarpSize);
}

// Then: lane r tells rank r how many parts it has been pushed, lane R + r how many sums.
template <Collective kOp, bool kMulticast>
DC_DEVICE void publish_parts(const CollectiveCall& call, int num_pushers, int take_block) {
  const World& world = call.world();
  const int lane = arch::lane_idx(), peer = lane % world.num_ranks;
  Published published;
  if (num_pushers > 0 && lane < world.num_ranks && (kMulticast || peer != world.rank)) {
    published = {&world.recv_line(peer, arch::block_idx(), world.rank)->tail, 0, num_pushers};
  } else if (CollectiveForm<kOp>::kSpreadsSums && take_block >= 0 && lane >= world.num_ranks &&
             lane < 2 * world.num_ranks && peer != world.rank) {
    published = {&world.recv_line(peer, take_block, world.rank)->done, num_pushers,
                 call.args.roles.num_reduce_warps};
  }
  publish_progress(call.context, call.entry->progress, published);
}

template <Collective kOp, Dtype kDtype, bool kMulticast>
DC_DEVICE void collective(const CollectiveArgs& args) {
  using Form = CollectiveForm<kOp>;
  const Context context{args.world, Form::kKernel, current_generation(args.world)};
  CollectiveEntry* entry =
      reinterpret_cast<CollectiveEntry*>(arch::dynamic_smem() + args.entry_offset);
  const CollectiveCall call{args, context, entry};
  const CollectiveRoles& roles = args.roles;
  const int block = arch::block_idx();
  note_in_block(context, TraceStep::kBegun);
  if (block == 0) announce_arrival(context, args.signature);
  entry->progress.reset();
  arch::sync_block();
  const int num_pushers = block < args.num_push_blocks ? roles.num_push_warps : 0;
  const int take_block = block - args.first_take_block;  // negative: this one takes nothing
  const int num_take_blocks = arch::num_blocks() - args.first_take_block;
  const int pusher = arch::warp_idx() - 1;
  const int reducer = pusher - num_pushers;
  const int gatherer = reducer - roles.num_reduce_warps;
  if (pusher < 0) {
    if (num_pushers > 0) enter(call);
    publish_parts<kOp, kMulticast>(call, num_pushers, take_block);
  } else if (reducer < 0) {
    push_parts<kOp, kMulticast>(call, {block, args.num_push_blocks, pusher, num_pushers});
  } else if (take_block < 0) {
    // nothing more to do here
  } else if (gatherer < 0) {
    if constexpr (Form::kReduces) {
      reduce_parts<kOp, kDtype, kMulticast>(
          call, {take_block, num_take_blocks, reducer, roles.num_reduce_warps}, pusher);
    }
  } else if (gatherer < roles.num_gather_warps) {
    if constexpr (Form::kGathers) {
      gather_parts<kOp, kDtype, kMulticast>(
          call, {take_block, num_take_blocks, gatherer, roles.num_gather_warps});
    }
  }
  const BlockExit exit = exit_block(context);
  note_in_block(context, TraceStep::kLeft);
  if (exit.is_last) close_generation(context);
}

}  // namespace deep_comm
