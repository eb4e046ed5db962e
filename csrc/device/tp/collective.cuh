// all_gather, reduce_scatter, all_reduce, all_reduce_norm: a rank stages its input, and its peers load from there.
//
// in     x [num_bytes]: shards of shard_bytes, of R ranks or one; the same on all ranks
// out    see CollectiveArgs
// grid   num_blocks blocks; a shard is dealt to them by parts of part_vecs vectors. Warp 0 of block 0
//        watches the entry; other warps stage, reduce or gather, part by part
// words  of block b, Tagged, written by b of this rank into each peer's memory, read by b there
//          recv_line.tail   parts staged        release / acquire
//          recv_line.done   parts summed        release / acquire      all-reduce in two shots
//          arrived          operation entered   as at the entry of every kernel
//        A word of the next generation counts as complete: its writer has left this one.
// before nothing: staging of this generation's parity was last read two generations ago, and all
//        peers have entered the generation between, since every collective waits for all of them
// after  on this rank's stream: out. Peers may still load from this rank's staging
// waits  end when every rank has launched the same operation: staging warps wait for nobody
//
// Sums are taken in float32 in rank order and rounded once, so that all ranks and runs have the same.
//
// With kMulticast an NVLink switch takes the sums, in float32 in an order that nobody specifies. Each
// rank stages its own part as well and waits for its own `tail`. In two shots the rank that adds a
// shard sends each sum to every staging by one store, over what was added, and every rank loads the sums
// from its own staging.
// * Such a store writes into the peers' memory. It comes after this rank has seen every rank's `tail`
//   of this generation for the part: a peer that has staged it has read what its staging held before,
//   be it of a collective or of a product. This rank alone reads the vectors that it overwrites, and
//   the thread that overwrites them has read them.
// * It ends before anybody's next use of that staging: every rank waits for all `done` before it leaves.
// * A switch is reached by another address than a rank's own memory. PTX orders accesses by different
//   addresses only if a proxy fence of aliases stands on the way from one to the other (PTX ISA,
//   "Proxies" and "Causality Order"). It stands before each release, where one warp makes it for all. From
//   launch to launch none is needed.
// * all_gather has no such form: it would store into peers' stagings before it has heard of them, while
//   they may still read what a product has left there, and would need room for R shards.
#pragma once

#include "device/move/parts.cuh"
#include "device/sync/barrier.cuh"
#include "device/sync/generation.cuh"
#include "device/tp/norm.cuh"

namespace deep_comm {

template <Collective kOp>
struct CollectiveForm {
  static constexpr bool kHasShards =
      kOp != Collective::kAllGather && kOp != Collective::kAllReduceOnce;
  static constexpr bool kNorms = kOp == Collective::kAllReduceNorm;
  static constexpr bool kReduces = kOp != Collective::kAllGather;
  static constexpr bool kStagesSums = kOp == Collective::kAllReduceTwice || kNorms;
  static constexpr bool kGathers = kOp == Collective::kAllGather || kStagesSums;
  static constexpr Kernel kKernel = kOp == Collective::kAllGather       ? Kernel::kAllGather
                                    : kOp == Collective::kReduceScatter ? Kernel::kReduceScatter
                                                                        : Kernel::kAllReduce;
};

enum CollectiveBarrier : int { kStagedBarrier = 1, kSummedBarrier };

// What the stages share.
struct CollectiveCall {
  const CollectiveArgs& args;
  const Context& context;
  uint64_t staging;  // of this generation, from a segment's start

  DC_DEVICE const World& world() const { return args.world; }
  DC_DEVICE uint8_t* staged(int rank, int shard) const {
    return world().bases[rank] + staging + shard * args.shard_vecs * sizeof(Vec16);
  }
  // Vector v of the shard in every rank's staging.
  DC_DEVICE Multicast staged_everywhere(int shard, int64_t v) const {
    return {args.multicast, world().bases, world().num_ranks,
            staging + (shard * args.shard_vecs + v) * sizeof(Vec16)};
  }
  DC_DEVICE int64_t bytes_of(int shard) const {
    const int64_t rest = args.num_bytes - shard * args.shard_bytes;
    return max_of<int64_t>(0, min_of(rest, args.shard_bytes));
  }
  DC_DEVICE VecRange part(int idx) const {
    const int64_t first =
        (static_cast<int64_t>(idx) * arch::num_blocks() + arch::block_idx()) * args.part_vecs;
    return {min_of(first, args.shard_vecs), min_of(first + args.part_vecs, args.shard_vecs)};
  }
  // Calls visit with the first vector of each row of part idx of a shard that falls to this warp. A
  // part has whole rows.
  template <class Visit>
  DC_DEVICE void for_rows(const Team& team, int idx, int shard, const Visit& visit) const {
    const VecRange range = part(idx);
    const int64_t end = min_of<int64_t>(range.end, bytes_of(shard) / sizeof(Vec16));
    const int64_t row_vecs = args.norm.row_vecs;
    for (int64_t first = range.first + team.warp * row_vecs; first < end;
         first += team.num_warps * row_vecs) {
      visit(first);
    }
  }
  DC_DEVICE uint8_t* normed(int shard, int64_t first) const {
    return args.norm.normed + shard * args.shard_bytes + first * sizeof(Vec16);
  }
};

// One warp of a team whose other warps have met it at a barrier: tells the peers about num_parts
// parts, and with kMulticast this rank.
template <uint64_t RecvLine::*kWord, bool kMulticast>
DC_DEVICE void publish_parts(const CollectiveCall& call, int num_parts) {
  const World& world = call.world();
  const int peer = arch::lane_idx();
  if (peer >= world.num_ranks || (!kMulticast && peer == world.rank)) return;
  // What was stored by one of the two addresses is loaded by the other.
  if constexpr (kMulticast) arch::fence_proxy_alias();
  // pairs with: await_parts at the peer — this block's parts before num_parts
  arch::st_release_sys(&(world.recv_line(peer, arch::block_idx(), world.rank)->*kWord),
                       Tagged::pack(call.context.generation, static_cast<uint32_t>(num_parts)));
}

// The whole warp: waits until every peer has published num_parts parts. The result is uniform.
//   unblocked by: publish_parts of the same block at every peer, and with kOfAll at this rank
template <uint64_t RecvLine::*kWord, bool kOfAll = false>
DC_DEVICE bool await_parts(const CollectiveCall& call, Stage stage, Word word, int num_parts) {
  const World& world = call.world();
  const int peer = arch::lane_idx(), block = arch::block_idx();
  bool ok = true;
  if (peer < world.num_ranks && (kOfAll || peer != world.rank)) {
    const uint32_t generation = call.context.generation;
    const uint32_t wanted = static_cast<uint32_t>(num_parts);
    uint64_t raw = 0;
    ok = await<Scope::kSys>(
        call.context, &(world.recv_line(world.rank, block, peer)->*kWord),
        {stage, word, peer, block}, Tagged::pack(generation, wanted),
        [=](uint64_t candidate) {
          const Tagged tagged = Tagged::unpack(candidate);
          return tagged.generation == next_generation(generation) ||
                 (is_of_generation(tagged, generation) && tagged.value >= wanted);
        },
        &raw);
  }
  // The barrier hands each lane's acquire to the whole warp.
  arch::sync_warp();
  return arch::all(kFullMask, ok);
}

template <Collective kOp, bool kMulticast>
DC_DEVICE void stage_parts(const CollectiveCall& call, const Team& team) {
  const CollectiveArgs& args = call.args;
  const World& world = call.world();
  for (int idx = 0; idx < args.num_parts; ++idx) {
    const VecRange range = call.part(idx);
    const auto stage = [&](int shard) {
      const uint8_t* src = args.x + shard * args.shard_bytes;
      const int64_t num_bytes = call.bytes_of(shard);
      Vec16* dst = reinterpret_cast<Vec16*>(call.staged(world.rank, shard));
      copy_range(
          team, range, [&](int64_t v) { return load_input(src, num_bytes, v); },
          [&](int64_t v, const Vec16& vec) { arch::st_weak(dst + v, vec); });
    };
    if constexpr (CollectiveForm<kOp>::kHasShards) {
      for (int turn = kMulticast ? 0 : 1; turn < world.num_ranks; ++turn) {
        stage((world.rank + turn) % world.num_ranks);
      }
    } else {
      stage(0);
    }
    arch::sync_named(kStagedBarrier, team.num_threads());
    if (team.warp == 0) publish_parts<&RecvLine::tail, kMulticast>(call, idx + 1);
  }
}

template <Collective kOp, Dtype kDtype, bool kMulticast>
DC_DEVICE void reduce_parts(const CollectiveCall& call, const Team& team) {
  using Form = CollectiveForm<kOp>;
  const CollectiveArgs& args = call.args;
  const World& world = call.world();
  const int shard = Form::kHasShards ? world.rank : 0;
  const uint8_t* x = args.x + shard * args.shard_bytes;
  uint8_t* out = args.out + (Form::kStagesSums ? shard * args.shard_bytes : 0);
  const int64_t num_bytes = call.bytes_of(shard);
  Vec16* sums = reinterpret_cast<Vec16*>(call.staged(world.rank, shard));
  const auto store = [&](int64_t v, Vec16 sum) {
    if constexpr (Form::kNorms) {
      if (v * static_cast<int64_t>(sizeof(Vec16)) >= num_bytes) return;
      const uint8_t* residual = args.norm.residual + shard * args.shard_bytes;
      sum = add_vecs<kDtype>(sum, load_input(residual, num_bytes, v));
    }
    store_output(out, num_bytes, v, sum);
    if constexpr (Form::kStagesSums && kMulticast) {
      arch::multimem_st_relaxed_sys(call.staged_everywhere(shard, v), sum);
    } else if constexpr (Form::kStagesSums) {
      arch::st_weak(sums + v, sum);
    }
  };
  for (int idx = 0; idx < args.num_parts; ++idx) {
    // After a failure the team still meets at its barriers.
    if (await_parts<&RecvLine::tail, kMulticast>(call, Stage::kStaged, Word::kStaged, idx + 1)) {
      if constexpr (kMulticast) {
        copy_range(
            team, call.part(idx),
            [&](int64_t v) {
              return arch::multimem_add_relaxed_sys<typename Numeric<kDtype>::Element>(
                  call.staged_everywhere(shard, v));
            },
            store);
      } else {
        add_range<kDtype>(
            team, call.part(idx), world.num_ranks,
            [&](int rank, int64_t v) {
              if (rank == world.rank) return load_input(x, num_bytes, v);
              return arch::ld_weak(reinterpret_cast<const Vec16*>(call.staged(rank, shard)) + v);
            },
            store);
      }
    }
    if constexpr (Form::kStagesSums) {
      arch::sync_named(kSummedBarrier, team.num_threads());
      // A warp that has failed has added nothing; the peers must not take that for sums.
      if (team.warp == 0 && !is_aborted(world)) {
        publish_parts<&RecvLine::done, kMulticast>(call, idx + 1);
      }
    }
    if constexpr (Form::kNorms) {
      // What went to every staging is there only when the switch has brought it back.
      const Vec16* rows = kMulticast ? reinterpret_cast<const Vec16*>(out) : sums;
      const auto load = [&](int64_t first) {
        return [=](int64_t v) { return arch::ld_weak(rows + first + v); };
      };
      call.for_rows(team, idx, shard, [&](int64_t first) {
        normalise_row<kDtype>(args.norm, call.normed(shard, first), load(first), load(first));
      });
    }
  }
}

template <Collective kOp, Dtype kDtype, bool kMulticast>
DC_DEVICE void gather_parts(const CollectiveCall& call, const Team& team) {
  constexpr bool kOfSums = CollectiveForm<kOp>::kStagesSums;
  const CollectiveArgs& args = call.args;
  const World& world = call.world();
  for (int idx = 0; idx < args.num_parts; ++idx) {
    const VecRange range = call.part(idx);
    if constexpr (!kOfSums) {
      uint8_t* out = args.out + world.rank * args.num_bytes;
      copy_range(
          team, range, [&](int64_t v) { return load_input(args.x, args.num_bytes, v); },
          [&](int64_t v, const Vec16& vec) { store_output(out, args.num_bytes, v, vec); });
    }
    const bool is_there =
        kOfSums ? await_parts<&RecvLine::done>(call, Stage::kSummed, Word::kSummed, idx + 1)
                : await_parts<&RecvLine::tail>(call, Stage::kStaged, Word::kStaged, idx + 1);
    if (!is_there) return;
    for (int turn = 1; turn < world.num_ranks; ++turn) {
      const int peer = (world.rank + turn) % world.num_ranks;
      const Vec16* src = reinterpret_cast<const Vec16*>(
          call.staged(kMulticast ? world.rank : peer, kOfSums ? peer : 0));
      uint8_t* out = args.out + peer * args.shard_bytes;
      const int64_t num_bytes = kOfSums ? call.bytes_of(peer) : args.num_bytes;
      if constexpr (CollectiveForm<kOp>::kNorms) {
        call.for_rows(team, idx, peer, [&](int64_t first) {
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
        copy_range(
            team, range, [&](int64_t v) { return arch::ld_weak(src + v); },
            [&](int64_t v, const Vec16& vec) { store_output(out, num_bytes, v, vec); });
      }
    }
  }
}

template <Collective kOp, Dtype kDtype, bool kMulticast>
DC_DEVICE void collective(const CollectiveArgs& args) {
  using Form = CollectiveForm<kOp>;
  const Context context{args.world, Form::kKernel, current_generation(args.world)};
  const CollectiveCall call{args, context,
                            args.staging + (context.generation & 1u) * args.staging_bytes};
  const CollectiveRoles& roles = args.roles;
  const int stager = arch::warp_idx() - 1;
  const int reducer = stager - roles.num_stage_warps;
  const int gatherer = reducer - roles.num_reduce_warps;
  if (stager < 0) {
    note_in_block(context, TraceStep::kBegun);
    if (arch::block_idx() == 0) {
      announce_arrival(context, args.signature);
      if (await_arrivals(context, Stage::kEntryBarrier, args.signature)) {
        note_in_warp(context, TraceStep::kEntered);
      }
    }
  } else if (reducer < 0) {
    stage_parts<kOp, kMulticast>(call, {stager, roles.num_stage_warps});
  } else if (gatherer < 0) {
    if constexpr (Form::kReduces) {
      reduce_parts<kOp, kDtype, kMulticast>(call, {reducer, roles.num_reduce_warps});
    }
  } else {
    if constexpr (Form::kGathers) {
      gather_parts<kOp, kDtype, kMulticast>(call, {gatherer, roles.num_gather_warps});
    }
  }
  const BlockExit exit = exit_block(context);
  note_in_block(context, TraceStep::kLeft);
  if (exit.is_last) close_generation(context);
}

}  // namespace deep_comm
