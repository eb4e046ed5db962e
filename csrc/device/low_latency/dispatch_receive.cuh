// The receive phase of dispatch. Every block receives what the blocks of its number sent, as it
// arrives, and copies each row to its output rows.
//
//   announcements and counts of all sources → per token: routes → output rows → copies
#pragma once

#include "device/low_latency/dispatch_expand.cuh"

namespace deep_comm {

// Fills the first num_columns of recv_counts[source, 0]: rows of this rank from source, and
// [source, 1 + e]: of local expert e. A source that is not in `sources` has none. One that is given
// up is noted.
DC_DEVICE bool await_counts(const Context& context, const LowLatencyDispatchArgs& args,
                            const LowLatencyBuffer& buffer, const BlockMemory& memory,
                            uint32_t sources, int num_local, int num_columns) {
  bool ok = true;
  const Divisor by_columns = Divisor::make(num_columns);
  // From the last thread on: the first warps wait for announcements and routes.
  for (int idx = arch::num_threads() - 1 - arch::thread_idx();
       idx < args.world.num_ranks * num_columns && ok; idx += arch::num_threads()) {
    const Position position = Position::of(idx, by_columns, num_columns);
    const int source = position.row, column = position.column;
    uint32_t* counter = &memory.recv_counts[source * (1 + num_local) + column];
    *counter = 0;
    if ((sources >> source & 1u) == 0) continue;
    ok = await_tagged_alone(context, buffer.counts(args.world.rank, source) + column,
                            {Stage::kCounts, Word::kTokenCount, source, -1}, counter);
    if (!ok && is_given_up(context, source)) {
      ok = true;
      arch::st_relaxed_cta(&memory.header->is_absent[source], 1u);
    }
  }
  return ok;
}

// With masks: block 0 decides whose rows this operation receives, and the other blocks follow it.
// Otherwise some blocks could leave room for the rows of a rank that falls silent, and others not.
// Returns false after a failure. *participants: a bit per rank. Arguments by value: see
// report_error.
DC_DEVICE_COLD bool agree_on_sources(Context context, const LowLatencyDispatchArgs& args,
                                     LowLatencyBuffer buffer, BlockMemory memory, int num_local,
                                     uint32_t* participants) {
  const uint32_t active = memory.active;
  uint64_t* word = &buffer.state()->participants;
  bool ok = true;
  *participants = active;
  if (arch::fault(Fault::kSkipAgreement)) return true;
  if (arch::block_idx() != 0) {
    uint32_t value = 0;
    if (arch::thread_idx() == 0) {
      // Block 0 may be about to give up several ranks, all at the same deadline.
      ok = await_tagged_alone(
          context, word, {Stage::kParticipants, Word::kMask, context.world.rank, 0}, &value, 4);
      memory.header->participants = value;
    }
    ok = block_agrees(ok);
    *participants = memory.header->participants;
    return ok;
  }
  if (arch::warp_idx() == 0) {
    ok = await_announcements(context, buffer, memory, active, args.signature, args.out.wait_stats);
    const int source = arch::lane_idx();
    if (source < context.world.num_ranks && is_given_up(context, source)) {
      arch::st_relaxed_cta(&memory.header->is_absent[source], 1u);
    }
  }
  ok = await_counts(context, args, buffer, memory, active, num_local, 1 + num_local) && ok;
  if (!block_agrees(ok)) return false;
  uint32_t present = 0;
  for (int source = 0; source < context.world.num_ranks; ++source) {
    if (memory.header->is_absent[source] == 0) present |= 1u << source;
  }
  *participants = present & active;
  // pairs with: the await above — nothing but the word itself
  if (arch::thread_idx() == 0)
    arch::st_relaxed_gpu(word, Tagged::pack(context.generation, *participants));
  return true;
}

// One block: writes the outputs that follow from the counts.
DC_DEVICE void write_counts(const LowLatencyDispatchArgs& args, const BlockMemory& memory,
                            int num_local) {
  const LowLatencyOutputs& out = args.out;
  const int num_ranks = args.world.num_ranks;
  DC_NO_UNROLL
  for (int column = arch::thread_idx(); column < 1 + num_local; column += arch::num_threads()) {
    const bool is_expert = column > 0, has_range = is_expert != out.is_compact;
    int64_t* ranges =
        out.layout_range + (is_expert ? static_cast<int64_t>(column - 1) * num_ranks : 0);
    uint32_t num_before = 0;
    DC_NO_UNROLL
    for (int source = 0; source < num_ranks; ++source) {
      const uint32_t count = memory.recv_counts[source * (1 + num_local) + column];
      if (has_range) {
        arch::st_weak(ranges + source,
                      static_cast<int64_t>(static_cast<uint64_t>(num_before) << 32 | count));
      }
      num_before += count;
    }
    write_received(out, column, static_cast<int32_t>(num_before));
  }
  if (arch::thread_idx() < num_ranks) {
    arch::st_weak(out.recv_tokens + arch::thread_idx(),
                  memory.header->num_tokens[arch::thread_idx()]);
  }
}

// One warp, after the announcements: tells the host, which may be waiting, the maximum number of
// tokens of a rank.
DC_DEVICE void report_num_tokens(const LowLatencyDispatchArgs& args, const int32_t* num_tokens,
                                 int num_ranks) {
  if (args.report == nullptr || arch::lane_idx() != 0) return;
  int32_t most = 0;
  for (int source = 0; source < num_ranks; ++source) most = max_of(most, num_tokens[source]);
  // pairs with: Engine::wait_low_latency_num_tokens — nothing but the word itself
  arch::st_relaxed_sys(args.report,
                       Tagged::pack(args.report_sequence, static_cast<uint32_t>(most)));
}

// One warp: lists the tasks of a group, one per warp of the block.
DC_DEVICE void list_tasks(const World& world, const LowLatencyBuffer& buffer,
                          const BlockMemory& memory, int first) {
  const BlockMemory::Header& header = *memory.header;
  const int warp = arch::lane_idx();
  if (warp >= min_of(arch::num_warps(), header.first_task[world.num_ranks] - first)) return;
  const int32_t task = find_task(world, memory, first + warp);
  const int source = source_of(task);
  memory.tasks[warp] = task;
  memory.task_rows[warp] = {buffer.slot_offset(source, token_of(task)), header.first_vec[source],
                            header.num_vecs[source]};
}

// The tasks if every source has as many tokens as this rank, which is the usual case. Their routes
// and rows can be polled before anything is known about the sources. One warp; the caller has a
// barrier of the block after it.
template <PayloadFormat kFormat>
DC_DEVICE void forecast_tasks(const LowLatencyDispatchArgs& args, const LowLatencyBuffer& buffer,
                              const BlockMemory& memory, const LowLatencyShare& share) {
  TaskNumbering::forecast(args.world, share, memory.rotation)
      .note(args.world, memory, Piece<kFormat>::kElements);
  arch::sync_warp();
  list_tasks(args.world, buffer, memory, 0);
}

// Whether all sources have as many tokens as this rank.
DC_DEVICE bool is_forecast_right(const LowLatencyDispatchArgs& args, const BlockMemory& memory) {
  const int source = arch::lane_idx();
  return arch::all(kFullMask, source >= args.world.num_ranks ||
                                  memory.header->num_tokens[source] == args.split.num_tokens);
}

// One warp: the tasks by what the sources have announced. The caller has a barrier of the block
// after it.
template <PayloadFormat kFormat>
DC_DEVICE void renumber_tasks(const LowLatencyDispatchArgs& args, const LowLatencyBuffer& buffer,
                              const BlockMemory& memory) {
  const World& world = args.world;
  const int position = min_of(arch::lane_idx(), world.num_ranks - 1);
  const int num_tokens = memory.header->num_tokens[peer_at(world, memory.rotation, position)];
  number_tasks(world, args.shape, memory.rotation, num_tokens)
      .note(world, memory, Piece<kFormat>::kElements);
  arch::sync_warp();
  list_tasks(world, buffer, memory, 0);
}

// Watches the route of a forecast task, and the announcement of its source. If the source announces
// something other than the forecast, no route need arrive.
struct ForecastRouteWatch {
  ArrivalWatch<Vec16> route;
  const uint64_t* announced;
  uint64_t expected;  // the word if the forecast is right
  uint64_t word;

  DC_DEVICE bool has_announced() const {
    return Tagged::unpack(word).generation == Tagged::unpack(expected).generation;
  }
  DC_DEVICE bool look() {
    word = arch::ld_relaxed_sys(announced);  // both loads are in flight together
    const bool arrived = route.look();
    return arrived || (has_announced() && word != expected);
  }
  DC_DEVICE uint64_t seen() const { return word; }
  DC_DEVICE void rest(const uint32_t* abort_word, uint64_t deadline_ns) const {
    if (has_announced()) return route.rest(abort_word, deadline_ns);
    arch::wait_hint(announced, word, abort_word, deadline_ns);
  }
};

// The first looks at routes, rows and scales of a group of tasks, all in flight together.
template <PayloadFormat kFormat>
struct GroupLooks {
  Vec16* routes;  // of the warp's task
  Vec16 route;    // this lane's
  RowPieces rows;
  ScalePiece<kFormat> scales;

  DC_DEVICE void look(const LowLatencyDispatchArgs& args, const LowLatencyBuffer& buffer,
                      const BlockMemory& memory, const ScaleOutputs<kFormat>& outputs,
                      int num_tasks) {
    if (arch::warp_idx() < num_tasks) {
      const int32_t task = memory.tasks[arch::warp_idx()];
      const int source = source_of(task);
      routes = buffer.routes(args.world.rank, source, arch::block_idx(),
                             token_of(task) - memory.header->first_token[source]);
      if (arch::lane_idx() < args.shape.num_topk)
        route = arch::ld_relaxed_sys(routes + arch::lane_idx());
    }
    if (args.shape.num_scales > 0)
      scales.look(args, buffer, memory, outputs, scales.first(), num_tasks);
    rows.look(args, buffer, memory, arch::thread_idx(), num_tasks);
  }
  // A warp that has a forecast task awaits its route, while other warps await announcements and
  // counts. Those waits report a silent rank, so this wait lasts longer.
  //   unblocked by: the source's send_routes, or its announcement of something else
  DC_DEVICE bool await_route(const Context& context, const LowLatencyDispatchArgs& args,
                             const LowLatencyBuffer& buffer, const BlockMemory& memory,
                             int num_tasks) {
    if (arch::warp_idx() >= num_tasks || arch::lane_idx() >= args.shape.num_topk) return true;
    if (has_arrived(route)) return true;
    const int source = source_of(memory.tasks[arch::warp_idx()]);
    const uint32_t announcement =
        args.signature << 16 | static_cast<uint32_t>(args.split.num_tokens);
    ForecastRouteWatch watch{{routes + arch::lane_idx(), route},
                             buffer.announced(args.world.rank, source),
                             Tagged::pack(context.generation, announcement),
                             0};
    const WaitFor wait{Stage::kRows, Word::kRoute, source, arch::block_idx()};
    if (!await_watch(context, watch, wait, watch.expected, 2)) return false;
    route = watch.route.value;
    return true;
  }
  // Polls again what was missing, while output rows are found.
  DC_DEVICE void look_again(bool has_scales) {
    if (has_scales && scales.task >= 0 && !has_arrived(scales.bits))
      scales.bits = arch::ld_relaxed_sys(scales.words);
    rows.arrivals.settle();
    rows.arrivals.look();
  }
};

// The one block that writes the outputs that follow from the counts.
DC_DEVICE bool is_writing_block() { return arch::block_idx() == 0; }

// The block, when it has looked at what num_now forecast tasks need: awaits what the sources say
// about their tokens. kRoutesEarly: the routes of the tasks at the same time, by threads that have
// issued no stores of rows before. Ends with a barrier of the block.
template <PayloadFormat kFormat, bool kRoutesEarly>
DC_DEVICE bool await_sources(const Context& context, const LowLatencyDispatchArgs& args,
                             const LowLatencyBuffer& buffer, const BlockMemory& memory,
                             GroupLooks<kFormat>& looks, uint32_t sources, int num_now) {
  const int num_ranks = args.world.num_ranks, num_warps = arch::num_warps();
  const int num_local = args.experts.num_local_experts(args.world.rank);
  // What the participants announced has come, even if this block does not see it yet: it gives none
  // of them up now.
  Context sure = context;
  sure.can_shrink = sure.can_shrink && arch::fault(Fault::kSkipAgreement);
  bool ok = true;
  // Routes belong to the first warps, counts to the last ones.
  if (arch::warp_idx() == (kRoutesEarly ? num_warps / 3 : 0)) {
    int64_t* wait_stats =
        context.can_shrink ? nullptr : args.out.wait_stats;  // agree_on_sources has measured
    ok = await_announcements(sure, buffer, memory, sources, args.signature, wait_stats);
    // Not after a failure: the host then waits for the error record.
    const bool has_failed = arch::any(kFullMask, !ok);
    // The numbers of tokens.
    arch::sync_warp();
    if (is_writing_block() && !has_failed)
      report_num_tokens(args, memory.header->num_tokens, num_ranks);
  }
  // Compact rows need only the counts of tokens. The counts of experts are for the block that
  // writes them.
  const int num_columns = args.out.is_compact && !is_writing_block() ? 1 : 1 + num_local;
  ok = await_counts(sure, args, buffer, memory, sources, num_local, num_columns) && ok;
  if constexpr (kRoutesEarly) ok = looks.await_route(context, args, buffer, memory, num_now) && ok;
  if (!block_agrees(ok)) return false;
  note_in_block(context, TraceStep::kEntered);
  if (is_writing_block()) {
    write_unused_rows(args.out, args.shape, num_ranks, first_row(memory, num_local, num_ranks, 0));
  }
  return true;
}

// After a barrier that follows forecast_tasks.
template <PayloadFormat kFormat, bool kRoutesEarly>
DC_DEVICE void dispatch_receive(const Context& context, const LowLatencyDispatchArgs& args,
                                const LowLatencyBuffer& buffer, const BlockMemory& memory) {
  const World& world = args.world;
  const int num_warps = arch::num_warps(), warp = arch::warp_idx();
  const int num_local = args.experts.num_local_experts(world.rank);
  const ScaleOutputs<kFormat> outputs =
      ScaleOutputs<kFormat>::of(args.shape, args.out, world.num_ranks * args.shape.num_max_tokens);
  uint32_t sources = memory.active;
  if (context.can_shrink) {
    uint32_t participants = 0;
    if (!agree_on_sources(context, args, buffer, memory, num_local, &participants)) return;
    sources = participants;
  }
  GroupLooks<kFormat> looks;
  bool knows_tasks = false;  // else they are a forecast
  bool ok = true;
  // Groups of a task per warp. The wait for the sources is in the loop so that the code of a look
  // is there once: a launch fetches its code anew.
  DC_NO_UNROLL
  for (int first = 0;;) {
    const int num_now = min_of(num_warps, memory.header->first_task[world.num_ranks] - first);
    looks.look(args, buffer, memory, outputs, num_now);
    if (!knows_tasks) {
      if (!await_sources<kFormat, kRoutesEarly>(context, args, buffer, memory, looks, sources,
                                                num_now)) {
        return;
      }
      knows_tasks = true;
      if (!is_forecast_right(args, memory)) {
        // Since the barrier above nobody uses the forecast.
        if (warp == 0) renumber_tasks<kFormat>(args, buffer, memory);
        arch::sync_block();
        continue;
      }
      looks.look_again(args.shape.num_scales > 0);
    }
    if (warp < num_now)
      ok = find_output_rows(context, args, memory, looks.routes, looks.route, num_local);
    if (!block_agrees(ok)) return;
    if (args.shape.num_scales > 0)
      ok = expand_scales<kFormat>(context, args, buffer, memory, outputs, looks.scales, num_now);
    ok = ok && expand_rows<kFormat>(context, args, buffer, memory, looks.rows, num_now);
    first += num_warps;
    if (first >= memory.header->first_task[world.num_ranks]) break;
    if (!block_agrees(ok)) return;  // all threads have read the output rows
    if (warp == 0) list_tasks(world, buffer, memory, first);
    arch::sync_block();
  }
  if (is_writing_block() && ok) write_counts(args, memory, num_local);
  if (ok) note_in_warp(context, TraceStep::kReceived);
}

}  // namespace deep_comm
