// The receive phase of dispatch between nodes. The rows of all sources are distributed over the
// blocks. A block receives each message as it arrives, forwards it to other ranks of the node if
// they need it, and copies its row to its output rows.
//
//   announcements and counts of all sources → first row of every (source, expert)
//   a row: routes → output rows → copies
//
// A block receives all its direct rows before any forwarded one. So direct rows depend on nobody's
// receive phase: all of them are received and forwarded, and then the forwarded ones arrive.
#pragma once

#include "device/low_latency/rail_block.cuh"
#include "device/low_latency/scales.cuh"

namespace deep_comm {

// Fills the first num_columns of counters[source, 0]: rows of this rank from source, and [source, 1
// + e]: of local expert e; and num_forwarded. A source that is not in the set `sources` has none;
// null: all ranks. Sources that are given up are removed from the set `present`, unless null.
DC_DEVICE bool await_counts(const RailContext& context, const LowLatencyRailBuffer& buffer,
                            const RailBlockMemory& memory, const uint32_t* sources,
                            uint32_t* present, int num_local, int num_columns) {
  bool ok = true;
  // From the last thread on: the first warp waits for announcements.
  using Words = LowLatencyRailWords;
  const int num_words = num_columns + 1;
  for (int idx = arch::num_threads() - 1 - arch::thread_idx();
       idx < buffer.group.num_ranks * num_words && ok; idx += arch::num_threads()) {
    const int source = idx / num_words, word = Words::kNumRows + idx % num_words;
    uint32_t count = 0;
    if (sources == nullptr || is_in_set(sources, source)) {
      ok = await_tagged_alone(context, buffer.own<uint64_t>(buffer.counts(source)) + word,
                              {Stage::kCounts, Word::kTokenCount, source, -1}, &count);
      if (!ok && is_given_up(context, source)) {
        ok = true;
        if (present != nullptr) take_from_set(present, source);
      }
    }
    if (word == Words::kNumForwarded) {
      memory.num_forwarded[source] = static_cast<int32_t>(count);
    } else {
      const int column = word == Words::kNumRows ? 0 : 1 + word - Words::kExperts;
      memory.counters[source * (1 + num_local) + column] = count;
    }
  }
  return ok;
}

// With masks: block 0 decides whose rows this operation receives, and the other blocks follow it.
// Otherwise some blocks could leave room for the rows of a rank that falls silent, and others not.
// Every thread. Arguments by value: see report_error.
DC_DEVICE_COLD bool agree_on_sources(RailContext context, const LowLatencyRailDispatchArgs& args,
                                     LowLatencyRailBuffer buffer, RailBlockMemory memory,
                                     int num_local) {
  const int num_ranks = buffer.group.num_ranks, warp = arch::warp_idx(), lane = arch::lane_idx();
  const int num_words = num_set_words(num_ranks);
  uint64_t* words = buffer.own<uint64_t>(buffer.words.participants);
  bool ok = true;
  if (arch::fault(Fault::kSkipAgreement)) return memory.agrees(true);
  if (arch::block_idx() != 0) {
    for (int word = lane; warp == 0 && word < num_words && ok; word += kWarpSize) {
      // Block 0 may be about to give up several ranks, one after another by lane.
      ok = await_tagged_alone(context, words + word,
                              {Stage::kParticipants, Word::kMask, buffer.group.rank, 0},
                              &memory.sources[word], 1 + num_words);
    }
    return memory.agrees(ok);
  }
  if (warp == 0) {
    ok = await_announcements(context, buffer, memory.active, args.signature, args.out.wait_stats,
                             memory.num_tokens);
    for (int source = lane; source < num_ranks; source += kWarpSize) {
      if (is_in_set(memory.active, source) && is_given_up(context, source))
        take_from_set(memory.sources, source);
    }
  }
  ok = await_counts(context, buffer, memory, memory.active, memory.sources, num_local,
                    1 + num_local) &&
       ok;
  if (!memory.agrees(ok)) return false;
  if (warp == 0) {
    for (int word = lane; word < num_words; word += kWarpSize) {
      // pairs with: the await above — nothing but the word itself
      arch::st_relaxed_gpu(words + word, Tagged::pack(context.generation, memory.sources[word]));
    }
  }
  return true;
}

// Threads [0, num_columns): turn counts into first rows, by a prefix sum over the sources. Block 0
// writes the outputs that follow from them.
DC_DEVICE void find_first_rows(const LowLatencyRailDispatchArgs& args,
                               const RailBlockMemory& memory, int num_local, int num_columns) {
  const LowLatencyOutputs& out = args.out;
  const int num_ranks = args.reach.group.num_ranks;
  const bool is_writing = arch::block_idx() == 0;
  for (int column = arch::thread_idx(); column < num_columns; column += arch::num_threads()) {
    const bool is_expert = column > 0, has_range = is_expert != out.is_compact;
    int64_t* ranges =
        out.layout_range + (is_expert ? static_cast<int64_t>(column - 1) * num_ranks : 0);
    uint32_t num_before = 0;
    for (int source = 0; source < num_ranks; ++source) {
      uint32_t* counter = &memory.counters[source * (1 + num_local) + column];
      const uint32_t count = *counter;
      *counter = num_before;
      if (is_writing && !is_expert) {
        arch::st_weak(args.num_rows + source, static_cast<int32_t>(count));
        arch::st_weak(args.num_rows + num_ranks + source, memory.num_forwarded[source]);
      }
      if (is_writing && has_range) {
        arch::st_weak(ranges + source,
                      static_cast<int64_t>(static_cast<uint64_t>(num_before) << 32 | count));
      }
      num_before += count;
    }
    if (!is_writing) continue;
    write_received(out, column, static_cast<int32_t>(num_before));
  }
  if (!is_writing) return;
  for (int source = arch::thread_idx(); source < num_ranks; source += arch::num_threads()) {
    arch::st_weak(out.recv_tokens + source, memory.num_tokens[source]);
  }
  if (args.report != nullptr && arch::thread_idx() == 0) {
    int32_t most = 0;
    for (int source = 0; source < num_ranks; ++source)
      most = max_of(most, memory.num_tokens[source]);
    // pairs with: Engine::wait_low_latency_num_tokens — nothing but the word itself
    arch::st_relaxed_sys(args.report,
                         Tagged::pack(args.report_sequence, static_cast<uint32_t>(most)));
  }
}

// What a message says beside its row, taken from its slot: by lane, for top-k entries lane and lane
// + 32.
struct TakenRoutes {
  Vec16 routes[2];
  uint32_t words[2];
  uint32_t token;  // lane 0: + 1

  DC_DEVICE static bool take(const RailContext& context, const LowLatencySlot& slot,
                             uint8_t* message, int source, TakenRoutes* taken) {
    const WaitFor wait{Stage::kRows, Word::kRoute, source, arch::block_idx()};
    uint32_t* words = reinterpret_cast<uint32_t*>(message + slot.words_offset());
    bool ok = true;
    *taken = {};
    DC_UNROLL
    for (int part = 0; part < 2; ++part) {
      const int k = arch::lane_idx() + part * kWarpSize;
      if (k >= slot.num_topk) continue;
      ok = ok &&
           take_arrival(context, reinterpret_cast<Vec16*>(message) + k, wait,
                        &taken->routes[part]) &&
           take_arrival(context, words + k, wait, &taken->words[part]);
    }
    if (arch::lane_idx() == 0)
      ok = ok && take_arrival(context, words + slot.num_topk, wait, &taken->token);
    return arch::all(kFullMask, ok);
  }
  // Writes the same into another rank's slot.
  DC_DEVICE void forward(const LowLatencySlot& slot, uint8_t* message) const {
    uint32_t* to = reinterpret_cast<uint32_t*>(message + slot.words_offset());
    DC_UNROLL
    for (int part = 0; part < 2; ++part) {
      const int k = arch::lane_idx() + part * kWarpSize;
      if (k >= slot.num_topk) continue;
      // pairs with: take at that rank — nothing but the words themselves
      arch::st_relaxed_sys(reinterpret_cast<Vec16*>(message) + k, routes[part]);
      arch::st_relaxed_sys(to + k, words[part]);
    }
    if (arch::lane_idx() == 0) arch::st_relaxed_sys(to + slot.num_topk, token);
  }
};

// One warp: forwards the routes of a direct message to the ranks of this node that need it. Their
// slots are noted in shared memory, because the row follows. Returns how many they are.
DC_DEVICE int find_forwards(const LowLatencyGroup& group, const LowLatencyRailBuffer& buffer,
                            const RailBlockMemory& memory, const TakenRoutes& taken,
                            const TokenRanks& ranks, const LowLatencySlot& slot, int source) {
  const int warp = arch::warp_idx();
  int num_forwards = 0;
  DC_UNROLL
  for (int part = 0; part < 2; ++part) {
    const int peer = ranks.ranks[part];
    const SlotWord to = SlotWord::unpack(taken.words[part]);
    const bool is_forward =
        ranks.is_first[part] && to.is_forwarded && group.is_near(peer) && peer != group.rank;
    const uint32_t forwards = arch::ballot(kFullMask, is_forward);
    if (is_forward) {
      const int number = num_forwards + arch::popc(forwards & ((1u << arch::lane_idx()) - 1));
      memory.forwards[warp * kMaxRanks + number] = (peer - group.first_near) << 16 | to.slot;
    }
    num_forwards += arch::popc(forwards);
  }
  arch::sync_warp();
  for (int number = 0; number < num_forwards; ++number) {
    const int32_t to = memory.forwards[warp * kMaxRanks + number];
    taken.forward(slot, buffer.near<uint8_t>(group.first_near + (to >> 16),
                                             buffer.slot(source, to & 0xffff)));
  }
  return num_forwards;
}

// One warp: a counted row whose message never arrives gets no output rows and no answer.
DC_DEVICE void forget_row(const LowLatencyRailDispatchArgs& args, const RailBlockMemory& memory,
                          int64_t slot_idx) {
  const int num_columns = args.out.is_compact ? 1 : args.shape.num_topk, warp = arch::warp_idx();
  for (int k = arch::lane_idx(); k < num_columns; k += kWarpSize)
    arch::st_weak(args.out.recv_rows + slot_idx * num_columns + k, -1);
  if (arch::lane_idx() != 0) return;
  arch::st_weak(args.return_addresses + slot_idx, ReturnAddress{0, 0}.pack());
  memory.num_rows[warp] = 0;
  memory.num_forwards[warp] = 0;
}

// One warp: finds the output rows of a message. They are noted in shared memory and in the outputs,
// together with the address that combine returns the result to.
DC_DEVICE bool find_output_rows(const RailContext& context, const LowLatencyRailDispatchArgs& args,
                                const LowLatencyRailBuffer& buffer, const RailBlockMemory& memory,
                                int32_t task, int num_local, bool is_direct) {
  const LowLatencyOutputs& out = args.out;
  const LowLatencyGroup& group = args.reach.group;
  const int num_topk = args.shape.num_topk, warp = arch::warp_idx(), source = source_of(task),
            slot = token_of(task);
  const int num_slots = group.num_ranks * args.shape.num_max_tokens;
  const int first_expert = args.experts.first_expert(group.rank);
  const LowLatencySlot layout = LowLatencySlot::of(args.shape);
  const uint32_t* first_rows = memory.counters + source * (1 + num_local);
  const int64_t slot_idx = static_cast<int64_t>(source) * args.shape.num_max_tokens + slot;
  TakenRoutes taken;
  if (!TakenRoutes::take(context, layout, buffer.own<uint8_t>(buffer.slot(source, slot)), source,
                         &taken)) {
    forget_row(args, memory, slot_idx);
    // Only a lane whose wait has failed must see why.
    return arch::any(kFullMask, is_given_up(context, source));
  }
  const TokenRanks ranks = TokenRanks::make(num_topk, [&](int /*k*/, int part) {
    const int expert = Route::unpack(taken.routes[part]).local_expert;
    return expert < 0 ? -1 : args.experts.rank_of(expert);
  });
  const int num_forwards =
      is_direct ? find_forwards(group, buffer, memory, taken, ranks, layout, source) : 0;
  const int token = static_cast<int>(arch::shfl(kFullMask, taken.token, 0)) - 1,
            order = ranks.before(group.rank);
  int num_rows = 0;
  int compact_row = 0;
  DC_UNROLL
  for (int part = 0; part < 2; ++part) {
    const int k = part * kWarpSize + arch::lane_idx();
    const Route route = Route::unpack(taken.routes[part]);
    const bool is_here = ranks.ranks[part] == group.rank;
    const int local = route.local_expert - first_expert;
    // The first entry of a rank has the row's ordinal there.
    const uint32_t says = arch::ballot(kFullMask, is_here && ranks.is_first[part]);
    if (says != 0) {
      compact_row = static_cast<int>(first_rows[0]) +
                    arch::shfl(kFullMask, route.row_ordinal, arch::ffs(says) - 1);
    }
    const uint32_t here = arch::ballot(kFullMask, is_here && !route.is_repeated());
    int out_row = -1;
    if (is_here && !out.is_compact) {
      out_row = local * num_slots + static_cast<int>(first_rows[1 + local]) + route.row();
      if (!route.is_repeated()) {
        memory
            .rows[warp * num_topk + num_rows + arch::popc(here & ((1u << arch::lane_idx()) - 1))] =
            out_row;
        arch::st_weak(out.src_info + out_row, token);
      }
    }
    num_rows += arch::popc(here);
    if (k >= num_topk || out.is_compact) continue;
    arch::st_weak(out.recv_rows + slot_idx * num_topk + k, out_row);
    if (out.recv_weights != nullptr) {
      arch::st_weak(out.recv_weights + slot_idx * num_topk + k, is_here ? route.weight : 0.0f);
    }
  }
  DC_UNROLL
  for (int part = 0; part < 2; ++part) {
    const int k = part * kWarpSize + arch::lane_idx();
    if (k >= num_topk || !out.is_compact) continue;
    const Route route = Route::unpack(taken.routes[part]);
    const bool is_here = ranks.ranks[part] == group.rank;
    const int64_t position = static_cast<int64_t>(compact_row) * num_topk + k;
    arch::st_weak(out.compact_idx + position,
                  out.idx_of(is_here ? route.local_expert - first_expert : -1));
    if (out.compact_weights != nullptr) {
      arch::st_weak(out.compact_weights + position, is_here ? route.weight : 0.0f);
    }
  }
  if (arch::lane_idx() != 0) return true;
  arch::st_weak(args.return_addresses + slot_idx, ReturnAddress{token, order}.pack());
  if (out.is_compact) {
    num_rows = 1;
    memory.rows[warp * num_topk] = compact_row;
    arch::st_weak(out.recv_rows + slot_idx, compact_row);
    arch::st_weak(out.src_info + compact_row, token);
  }
  memory.num_rows[warp] = num_rows;
  memory.num_forwards[warp] = num_forwards;
  return true;
}

// A thread's pieces of the rows of a group of tasks, kCount at a time. Their first looks are in
// flight together.
struct RailRowPieces {
  static constexpr int kCount = 4;
  Vec16 vecs[kCount];
  Vec16* from[kCount];  // null: none
  int tasks[kCount];    // index of the warp
  int columns[kCount];  // in vectors of 16 bytes

  // Piece numbers first, first + num_threads, … of num_tasks rows.
  DC_DEVICE void look(const LowLatencyRailDispatchArgs& args, const LowLatencyRailBuffer& buffer,
                      const RailBlockMemory& memory, const Divisor& by_vecs, int first,
                      int num_tasks) {
    const LowLatencySlot slot = LowLatencySlot::of(args.shape);
    const int num_vecs = args.shape.row_bytes / static_cast<int>(sizeof(Vec16));
    DC_UNROLL
    for (int step = 0; step < kCount; ++step) {
      const int idx = first + step * arch::num_threads();
      from[step] = nullptr;
      if (idx >= num_tasks * num_vecs) continue;
      tasks[step] = by_vecs.quotient(idx);
      columns[step] = idx - tasks[step] * num_vecs;
      const int32_t task = memory.tasks[tasks[step]];
      from[step] =
          buffer.own<Vec16>(buffer.slot(source_of(task), token_of(task)) + slot.row_offset()) +
          columns[step];
      vecs[step] = arch::ld_relaxed_sys(from[step]);
    }
  }
};

// The block forwards the rows of its warps' tasks, and copies them to their output rows. `pieces`:
// the first look at this thread's first pieces.
template <PayloadFormat kFormat>
DC_DEVICE bool expand_rows(const RailContext& context, const LowLatencyRailDispatchArgs& args,
                           const LowLatencyRailBuffer& buffer, const RailBlockMemory& memory,
                           const Divisor& by_vecs, RailRowPieces& pieces, int num_tasks) {
  const LowLatencyShape& shape = args.shape;
  const int num_total = num_tasks * (shape.row_bytes / static_cast<int>(sizeof(Vec16)));
  for (int base = arch::thread_idx(); base < num_total;
       base += arch::num_threads() * RailRowPieces::kCount) {
    if (base != arch::thread_idx()) pieces.look(args, buffer, memory, by_vecs, base, num_tasks);
    DC_UNROLL
    for (int step = 0; step < RailRowPieces::kCount; ++step) {
      if (pieces.from[step] == nullptr) continue;
      const int task = pieces.tasks[step];
      const WaitFor wait{Stage::kRows, Word::kRow, source_of(memory.tasks[task]),
                         arch::block_idx()};
      // Every message has rows here, unless it has been given up.
      if (memory.num_rows[task] == 0) continue;
      if (!take_arrival(context, pieces.from[step], wait, &pieces.vecs[step])) {
        if (!is_given_up(context, wait.peer)) return false;
        continue;  // combine returns nothing to a source that is given up
      }
      for (int idx = 0; idx < memory.num_forwards[task]; ++idx) {
        const int32_t to = memory.forwards[task * kMaxRanks + idx];
        const size_t slot = buffer.slot(source_of(memory.tasks[task]), to & 0xffff);
        Vec16* row = buffer.near<Vec16>(buffer.group.first_near + (to >> 16),
                                        slot + LowLatencySlot::of(shape).row_offset());
        // pairs with: take_arrival above at that rank — nothing but the words themselves
        arch::st_relaxed_sys(row + pieces.columns[step], pieces.vecs[step]);
      }
      const Vec16 vec = decode<kFormat>(pieces.vecs[step]);
      for (int idx = 0; idx < memory.num_rows[task]; ++idx) {
        const size_t out_row = memory.rows[task * shape.num_topk + idx];
        uint8_t* row = args.out.recv_x + out_row * shape.row_bytes;
        arch::st_streaming(reinterpret_cast<Vec16*>(row) + pieces.columns[step], vec);
      }
    }
  }
  return true;
}

// The same for the scales.
template <PayloadFormat kFormat>
DC_DEVICE bool expand_scales(const RailContext& context, const LowLatencyRailDispatchArgs& args,
                             const LowLatencyRailBuffer& buffer, const RailBlockMemory& memory,
                             int num_tasks) {
  const LowLatencyShape& shape = args.shape;
  const ScaleOutputs<kFormat> outputs =
      ScaleOutputs<kFormat>::of(shape, args.out, args.reach.group.num_ranks * shape.num_max_tokens);
  const int num_outputs = outputs.num_outputs;
  const Divisor by_outputs = Divisor::make(num_outputs);
  // From the last thread on: the first threads have most pieces of rows.
  for (int base = arch::num_threads() - 1 - arch::thread_idx(); base < num_tasks * num_outputs;
       base += arch::num_threads()) {
    const int task = by_outputs.quotient(base), output = base - task * num_outputs;
    const int source = source_of(memory.tasks[task]);
    if (memory.num_rows[task] == 0) continue;
    uint32_t* scales = buffer.own<uint32_t>(buffer.slot(source, token_of(memory.tasks[task])) +
                                            LowLatencySlot::of(shape).scales_offset());
    const WaitFor wait{Stage::kRows, Word::kScale, source, arch::block_idx()};
    uint32_t value = 0;
    for (int idx = 0; idx < outputs.num_words(output); ++idx) {
      uint32_t bits = 0;
      if (!take_arrival(context, scales + outputs.first_word(output) + idx, wait, &bits)) {
        if (!is_given_up(context, source)) return false;
        continue;
      }
      for (int forward = 0; forward < memory.num_forwards[task]; ++forward) {
        const int32_t to = memory.forwards[task * kMaxRanks + forward];
        const size_t slot =
            buffer.slot(source, to & 0xffff) + LowLatencySlot::of(shape).scales_offset();
        uint32_t* words = buffer.near<uint32_t>(buffer.group.first_near + (to >> 16), slot);
        // pairs with: the same take at that rank — nothing but the word itself
        arch::st_relaxed_sys(words + outputs.first_word(output) + idx, bits);
      }
      value |= outputs.part(bits, idx);
    }
    for (int idx = 0; idx < memory.num_rows[task]; ++idx) {
      const int out_row = memory.rows[task * shape.num_topk + idx];
      const int group = out_row / outputs.num_slots, row = out_row - group * outputs.num_slots;
      arch::st_weak(
          static_cast<uint32_t*>(args.out.recv_scales) + outputs.position(group, row, output),
          value);
    }
  }
  return true;
}

template <PayloadFormat kFormat>
DC_DEVICE void dispatch_receive(const RailContext& context, const LowLatencyRailDispatchArgs& args,
                                const LowLatencyRailBuffer& buffer, const RailBlockMemory& memory) {
  const LowLatencyGroup& group = args.reach.group;
  const int num_warps = arch::num_warps(), warp = arch::warp_idx();
  const int num_local = args.experts.num_local_experts(group.rank);
  // Compact rows need only the counts of rows. The counts of experts are for block 0, which writes
  // them.
  const int num_columns = args.out.is_compact && arch::block_idx() != 0 ? 1 : 1 + num_local;
  bool ok = true;
  int64_t* wait_stats = args.out.wait_stats;
  const uint32_t* sources = nullptr;
  // What the participants announced has come, even if this block does not see it yet: it gives none
  // of them up now.
  RailContext sure = context;
  sure.can_shrink = sure.can_shrink && arch::fault(Fault::kSkipAgreement);
  if (context.can_shrink) {
    if (!agree_on_sources(context, args, buffer, memory, num_local)) return;
    ++memory.num_agreements;  // agree_on_sources has used one barrier more
    wait_stats = nullptr;     // agree_on_sources has measured
    sources = memory.sources;
  }
  if (warp == 0) {
    ok = await_announcements(sure, buffer, sources, args.signature, wait_stats, memory.num_tokens);
  }
  ok = await_counts(sure, buffer, memory, sources, nullptr, num_local, num_columns) && ok;
  if (!memory.agrees(ok)) return;
  int32_t* first_forwarded = memory.first_task + group.num_ranks + 1;
  if (warp == 0) {
    number_tasks(group, memory.first_task, [&](int source) {
      return static_cast<int>(memory.counters[source * (1 + num_local)]) -
             memory.num_forwarded[source];
    });
  }
  if (warp == num_warps - 1) {
    number_tasks(group, first_forwarded, [&](int source) { return memory.num_forwarded[source]; });
  }
  arch::sync_block();
  find_first_rows(args, memory, num_local, num_columns);
  if (arch::block_idx() == 0) {
    write_unused_rows(args.out, args.shape, group.num_ranks,
                      memory.first_task[group.num_ranks] + first_forwarded[group.num_ranks]);
  }
  // A wait for a row that another rank forwards lasts longer than that rank's own waits. The waits
  // for announcements find out which rank is missing.
  RailContext patient = context;
  if (!context.can_shrink) patient.patience = 2;  // with masks, a rank that waits says so
  const Divisor by_vecs = Divisor::make(args.shape.row_bytes / static_cast<int>(sizeof(Vec16)));
  for (const bool is_direct : {true, false}) {
    const RailContext& waits = is_direct ? context : patient;
    const BlockTasks tasks = BlockTasks::of(group, is_direct ? memory.first_task : first_forwarded);
    for (int first = 0; first < tasks.count; first += num_warps) {
      const int num_now = min_of(num_warps, tasks.count - first);
      if (warp == 0 && arch::lane_idx() < num_now) {
        const int32_t task = tasks.find(group, first + arch::lane_idx());
        memory.tasks[arch::lane_idx()] =
            is_direct ? task : pack_task(source_of(task), slot_of(args.shape, token_of(task), 0));
      }
      arch::sync_block();
      RailRowPieces pieces;
      pieces.look(args, buffer, memory, by_vecs, arch::thread_idx(), num_now);
      if (warp < num_now)
        ok =
            find_output_rows(waits, args, buffer, memory, memory.tasks[warp], num_local, is_direct);
      if (!memory.agrees(ok)) return;
      if (args.shape.num_scales > 0)
        ok = expand_scales<kFormat>(waits, args, buffer, memory, num_now);
      ok = ok && expand_rows<kFormat>(waits, args, buffer, memory, by_vecs, pieces, num_now);
      if (!memory.agrees(ok)) return;  // all threads have read the output rows
    }
  }
}

}  // namespace deep_comm
