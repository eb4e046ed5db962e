// Where every rank's rows belong. Announced together with an arrival: that of notify_dispatch, or
// of dispatch itself.
#pragma once

#include "device/intranode/args.cuh"
#include "device/layout/output.cuh"
#include "device/sync/barrier.cuh"
#include "device/sync/generation.cuh"
#include "device/sync/publisher.cuh"

namespace deep_comm {

enum class DispatchMode : int { kFailed, kRings, kDirect };

// What a dispatch begins with. The same in every block, unless this rank has failed.
struct DispatchStart {
  uint32_t generation;  // of the dispatch
  NotifyResult notified;
};

// One thread: waits for the notify before this kernel, which may still run.
DC_DEVICE DispatchStart await_notify(const World& world) {
  const LocalState* state = world.state();
  uint64_t word = 0;
  // More than a deadline: notify has one of its own, and knows the silent rank.
  const bool ok = await<Scope::kSys>(
      Context{world, Kernel::kDispatch, 0}, &state->notified,
      {Stage::kCounts, Word::kArrived, world.rank, -1}, 1,
      [=](uint64_t value) {
        // An earlier notify's word has an older generation: a dispatch has followed that notify, or
        // Engine::clear_error has zeroed its word.
        return value != 0 &&
               Tagged::unpack(value).generation == arch::ld_relaxed_gpu(&state->generation);
      },
      &word, 4);
  if (!ok) return {0, NotifyResult::kFailed};
  const Tagged notified = Tagged::unpack(word);
  return {next_generation(notified.generation), static_cast<NotifyResult>(notified.value)};
}

// The result of a notify that has ended.
DC_DEVICE NotifyResult result_of_notify(const World& world) {
  const uint64_t word = arch::ld_relaxed_gpu(&world.state()->notified);
  return static_cast<NotifyResult>(Tagged::unpack(word).value);
}

// The block. shared: in its memory.
DC_DEVICE DispatchStart start_dispatch(const DispatchArgs& args, DispatchStart* shared) {
  if (!args.follows_notify) return {current_generation(args.world), NotifyResult::kNotDirect};
  if (arch::thread_idx() == 0) *shared = await_notify(args.world);
  arch::sync_block();
  return *shared;
}

// One receiver's output block, as this rank addresses it. x is null if the receiver has none.
struct PeerOutput {
  uint8_t* x;
  uint8_t* scales;
  uint8_t* topk_idx;
  float* topk_weights;
  int32_t* src_idx;
  int32_t* recv_rows;  // expanded only
  int64_t num_rows;
};

// What warp 0 finds at entry, for its block, and what the block's warps report; in shared memory.
struct DispatchEntry {
  DispatchStart start;
  DispatchMode mode;
  Progress progress;  // ring mode
  PeerOutput outputs[kMaxRanks];
};

// An OutputLocation as three words. kExactRows, in `rows`: the block is laid out for the rows that
// arrive, not for the rows that fit.
struct OutputWords {
  static constexpr uint32_t kExactRows = 1u << 31;

  uint32_t line;
  uint32_t src_line;
  uint32_t rows;

  DC_HOST_DEVICE static OutputWords of(const OutputLocation& location) {
    return {location.output_line, location.src_line,
            static_cast<uint32_t>(location.num_rows) | (location.is_exact ? kExactRows : 0)};
  }
  DC_HOST_DEVICE bool has_room(int64_t num_rows) const {
    return line != 0 && num_rows <= static_cast<int64_t>(rows & ~kExactRows);
  }
};

// Block 0 of dispatch: announces to every peer that this rank has entered, and where its block
// lies.
DC_DEVICE void announce_output(const Context& context, const DispatchArgs& args) {
  const World& world = args.world;
  const int peer = arch::thread_idx();
  if (!world.takes_part(peer)) return;
  const OutputWords words =
      OutputWords::of({args.output_line, args.src_line, args.num_recv_rows, false});
  ArrivedLine* line = world.arrived_line(peer, world.rank);
  announce_arrival(context, args.signature,
                   {&line->output_line, &line->src_line, &line->output_rows},
                   {words.line, words.src_line, words.rows});
}

// Lane p of a warp: waits for rank p and reads what it announced. No peer can be a kernel further:
// it waits for this rank's blocks before it ends.
DC_DEVICE bool await_output(const Context& context, const DispatchArgs& args, int peer,
                            OutputWords* words) {
  const ArrivedLine* line = args.world.arrived_line(args.world.rank, peer);
  EntryWatch<3> watch{&line->arrived,
                      {&line->output_line, &line->src_line, &line->output_rows},
                      context.generation,
                      args.signature,
                      0,
                      {}};
  const bool ok = await_entry(context, watch, Stage::kEntryBarrier, peer);
  *words = {watch.value(0), watch.value(1), watch.value(2)};
  return ok;
}

// What `peer` announced in a notify of that generation. Valid from await_all_entered of the notify
// until its dispatch is done. The line of arrival does not serve: a peer that has entered a later
// dispatch may have overwritten it.
DC_DEVICE OutputWords words_of_notify(const World& world, int peer, uint32_t generation) {
  const int32_t* header = world.counts(world.rank, peer, generation);
  const auto field = [&](HeaderField name) {
    return static_cast<uint32_t>(arch::ld_weak(header + static_cast<int>(name)));
  };
  return {field(HeaderField::kOutputLine), field(HeaderField::kSrcLine),
          field(HeaderField::kOutputRows)};
}

// The block of rank `peer`, which receives num_recv_rows rows, as this rank addresses it.
template <class Form>
DC_DEVICE PeerOutput output_at(const DispatchArgs& args, int peer, const OutputWords& words,
                               int64_t num_recv_rows) {
  const World& world = args.world;
  const int64_t num_rows = (words.rows & OutputWords::kExactRows) != 0
                               ? num_recv_rows
                               : static_cast<int64_t>(words.rows);
  const OutputLayout layout =
      OutputLayout::make(num_rows, args.message.row_bytes, args.num_scales * args.scale_bytes,
                         Form::kExpanded ? min_of(args.message.num_topk, 1) : args.message.num_topk,
                         args.topk_idx_bytes);
  uint8_t* block = world.bases[peer] + static_cast<size_t>(words.line) * kLineBytes;
  uint8_t* src_block = words.src_line == 0
                           ? nullptr
                           : world.bases[peer] + static_cast<size_t>(words.src_line) * kLineBytes;
  const SourceLayout sources =
      SourceLayout::make(num_rows, Form::kExpanded ? args.message.num_topk : 0);
  return {
      block + layout.x,
      block + layout.scales,
      block + layout.topk_idx,
      reinterpret_cast<float*>(block + layout.topk_weights),
      reinterpret_cast<int32_t*>(src_block),
      src_block == nullptr ? nullptr : reinterpret_cast<int32_t*>(src_block + sources.recv_rows),
      num_rows};
}

}  // namespace deep_comm
