// combine, staged mode, the receiving half of a block. One warp watches a window of tokens, one per
// lane, and passes on those whose rows have all arrived, in any order. Teams of warps add them,
// each warp some columns.
//
// If each warp handled a token alone, ten dependent trips to memory would follow its last row, and
// warps that each poll for their own token would keep memory busy.
//
// words  recv_line.landed, read · taken.num_tokens · see combine_staged.cuh
//        Of an expanded output, rows of this rank land, too: combine_sums makes them
//        entry.num_ready, num_using (shared memory) · between watch and teams
// waits  watch: for chunks, unblocked by their senders, and for slots, unblocked by the teams;
//        teams: for the watch. Senders wait for neither
#pragma once

#include "device/channel/landed.cuh"
#include "device/intranode/combine_reduce.cuh"
#include "device/sync/generation.cuh"

namespace deep_comm {

// The adding warps of a block, in teams. A warp reads at most twice as much of a row as it can have
// in flight.
struct AddTeams {
  int size;  // warps
  int num_teams;

  DC_DEVICE static AddTeams of(const CombineArgs& args) {
    const int num_warps = CombineEntry::num_reduce_warps(args);
    const int num_units = ceil_div(args.message.row_bytes / 16, kVecsOfReduceStep);
    int size = min_of(ceil_div(num_units, 2), num_warps);
    size = max_of(size, ceil_div(num_warps, TokenWindow::kMaxTeams));
    return {size, num_warps / size};
  }
};

template <bool kIsExpanded>
class TokenWatch;

// A wait of the whole warp: all lanes go on, or none. Through it `await` asks TokenWatch instead of
// each lane, and one lane stands for all: it checks the deadline, sleeps on its word, and its rank
// is named in the error.
template <bool kIsExpanded>
struct WatchContext {
  using Clock = WaitClock;

  const World& world;
  const TokenWatch<kIsExpanded>& watch;
};
template <bool kIsExpanded>
DC_DEVICE bool may_go_on(const WatchContext<kIsExpanded>& context, const WaitFor& wait,
                         uint64_t seen, uint64_t expected, uint64_t patience, WaitClock* clock);

// The watching warp. Lane i handles slot i of the window.
template <bool kIsExpanded>
class TokenWatch {
 public:
  DC_DEVICE TokenWatch(const Context& context, const CombineArgs& args, CombineEntry* entry)
      : context_(context),
        args_(args),
        entry_(entry),
        counter_(&taken_work(context)->num_tokens),
        per_channel_(ceil_div(args.num_tokens, args.ring.num_channels)),
        team_size_(AddTeams::of(args).size),
        num_firsts_(args.num_window_slots * arch::num_blocks()) {
    const int num_ranks = args.world.num_ranks, rank = args.world.rank, lane = arch::lane_idx();
    // The same warp has filled it.
    const CombineStart& start = entry->start;
    own_first_ = rank == 0 ? 0 : start.sent[(rank - 1) * num_ranks + rank];
    if (lane < num_ranks) {
      int first = 0;
      DC_NO_UNROLL
      for (int peer = 0; peer < lane; ++peer) {
        if (peer != rank) first += start.num_rows(num_ranks, rank, peer);
      }
      entry->window.first_rows[lane] =
          lane == rank ? args.x + static_cast<int64_t>(own_first_) * args.message.row_bytes
                       : staging_slot(args, rank, args.staging_line, first);
      entry->window.chunk_shift[lane] =
          ChunkedRows::of(args, start.num_rows(num_ranks, rank, lane)).shift;
    }
    // The window, before look_up reads it.
    arch::sync_warp();
  }

  // Returns when all tokens have been passed on.
  DC_DEVICE void run() {
    while (true) {
      pass_on_ready();
      refill();
      if (arch::any(kFullMask, is_pending() && pending_ == 0)) continue;
      if (!arch::any(kFullMask, is_pending() || wants_token())) break;
      if (!await_news()) return;
    }
    note_in_warp(context_, TraceStep::kReceived, num_ready_);
    // pairs with: add_ready — nothing but the word itself
    if (arch::lane_idx() == 0) {
      arch::st_release_cta(&entry_->num_ready, num_ready_ | TokenWindow::kAll);
    }
  }

  // For await_watch, the whole warp: true if a token can be passed on, or a slot filled.
  DC_DEVICE bool look() {
    // Relaxed: acquires would wait for each other.
    uint64_t raw[kMaxRanks];
    DC_UNROLL
    for (int peer = 0; peer < kMaxRanks; ++peer) {
      if ((pending_ >> peer & 1u) != 0) raw[peer] = arch::ld_relaxed_sys(words_[peer]);
    }
    uint32_t landed = 0;
    DC_UNROLL
    for (int peer = kMaxRanks - 1; peer >= 0; --peer) {
      if ((pending_ >> peer & 1u) == 0) continue;
      if (Tagged::unpack(raw[peer]).generation == context_.generation) {
        landed |= 1u << peer;
      } else {
        seen_ = raw[peer];
      }
    }
    pending_ &= ~landed;
    while (arch::any(kFullMask, landed != 0)) {
      // pairs with: ChunksToRanks::publish_chunk, publish_sum_chunks — the chunk's rows
      if (landed != 0) arch::ld_acquire_sys(word_of(arch::ffs(landed) - 1));
      landed &= landed - 1;
    }
    const bool is_news = is_pending() ? pending_ == 0 : wants_token() && is_free();
    return arch::any(kFullMask, is_news);
  }
  DC_DEVICE uint64_t seen() const { return seen_; }
  // What the warp is waiting for, as one lane sees it. The other lanes do nothing.
  DC_DEVICE bool may_go_on_all(uint64_t patience, WaitClock* clock) const {
    bool ok = true;
    if (is_waiting_for_all()) {
      // Warps of this block are bounded by their own waits.
      const WaitFor wait = is_pending()
                               ? awaited_row()
                               : WaitFor{Stage::kRetire, Word::kProgress, args_.world.rank, -1};
      ok = may_go_on(context_, wait, seen_, Tagged::pack(context_.generation, 1), patience, clock);
    }
    return arch::all(kFullMask, ok);
  }
  DC_DEVICE void rest(const uint32_t* abort_word, uint64_t deadline_ns) const {
    // One lane is enough: what it waits for arrives, whatever the others do.
    if (!is_waiting_for_all()) return;
    if (is_pending()) {
      arch::wait_hint(word_of(arch::ffs(pending_) - 1), seen_, abort_word, deadline_ns);
    } else {
      arch::wait_hint(&entry_->num_using[arch::lane_idx()], num_using_, abort_word, deadline_ns);
    }
  }

 private:
  DC_DEVICE bool is_pending() const { return token_ >= 0; }
  DC_DEVICE void await_row(int peer, int row) {
    const int chunk = row >> entry_->window.chunk_shift[peer];
    words_[peer] = landed_word(args_.world, args_.world.rank, peer, chunk);
    pending_ |= 1u << peer;
  }
  // A peer's, if one is missing.
  DC_DEVICE WaitFor awaited_row() const {
    uint32_t peers = pending_;
    if constexpr (kIsExpanded) {
      const uint32_t others = pending_ & ~(1u << args_.world.rank);
      if (others != 0) peers = others;
    }
    return {Stage::kReduce, Word::kLanded, arch::ffs(peers) - 1, -1};
  }
  DC_DEVICE bool wants_token() const {
    return token_ < 0 && !is_exhausted_ && arch::lane_idx() < args_.num_window_slots;
  }
  DC_DEVICE bool is_free() {
    // pairs with: add_ready — the warps of the team have read the slot
    num_using_ = arch::ld_acquire_cta(&entry_->num_using[arch::lane_idx()]);
    return num_using_ == 0 || arch::fault(Fault::kSkipCredit);
  }
  DC_DEVICE const uint64_t* word_of(int peer) const {
    const uint64_t* word = nullptr;
    DC_UNROLL
    for (int idx = 0; idx < kMaxRanks; ++idx) word = idx == peer ? words_[idx] : word;
    return word;
  }
  // The lane that rests. Its wait is named if the wait fails.
  DC_DEVICE bool is_waiting_for_all() const { return arch::lane_idx() == speaker_; }

  DC_DEVICE bool await_news() {
    const uint32_t pending = arch::ballot(kFullMask, is_pending());
    const uint32_t wanting = arch::ballot(kFullMask, wants_token());
    speaker_ = arch::ffs(pending != 0 ? pending : wanting) - 1;
    const WatchContext<kIsExpanded> watch_context{args_.world, *this};
    return await_watch(watch_context, *this, {}, 0, pending != 0 ? 1 : 4);
  }

  // Fills free slots with tokens. The first tokens of a block are fixed by its number.
  DC_DEVICE void refill() {
    const bool wants = wants_token() && is_free();
    const uint32_t wanting = arch::ballot(kFullMask, wants);
    if (wanting == 0) return;
    const uint32_t lane = arch::lane_idx(), num_tokens = args_.num_tokens;
    uint32_t token = lane * arch::num_blocks() + arch::block_idx();
    uint32_t end = num_firsts_;
    if (has_firsts_) {
      uint32_t first = 0;
      if (lane == 0) {
        first = num_firsts_ +
                arch::atomic_add_relaxed_gpu(counter_, static_cast<uint32_t>(arch::popc(wanting)));
      }
      first = arch::shfl(kFullMask, first, 0);
      token = first + arch::popc(wanting & ((1u << lane) - 1));
      end = first + arch::popc(wanting);
    }
    has_firsts_ = true;
    is_exhausted_ = end >= num_tokens;
    if (wants && token < num_tokens) look_up(static_cast<int>(token));
  }

  // Fills this lane's slot: the biases of `token`, then its rows in their order.
  DC_DEVICE void look_up(int token) {
    const int num_ranks = args_.world.num_ranks, rank = args_.world.rank;
    const int channel = token / per_channel_, num_channels = args_.ring.num_channels;
    int row_of[kMaxRanks];
    DC_UNROLL
    for (int peer = 0; peer < kMaxRanks; ++peer) {
      row_of[peer] = -1;
      if (peer >= num_ranks) continue;
      const int head =
          arch::ld_nc(args_.send_head + static_cast<int64_t>(token) * num_ranks + peer);
      const int before =
          channel == 0
              ? 0
              : arch::ld_nc(args_.channel_prefix_matrix + peer * num_channels + channel - 1);
      row_of[peer] = head < 0 ? -1 : before + head;
    }
    TokenWindow::Slot& slot = entry_->window.slots[arch::lane_idx()];
    uint32_t present = 0;
    DC_UNROLL
    for (int peer = 0; peer < kMaxRanks; ++peer) {
      // A worst-case handle may name rows that were dropped. dispatch has reported that.
      const bool is_dropped = peer == rank && own_first_ + row_of[peer] >= args_.num_rows;
      if (row_of[peer] >= 0 && !is_dropped) present |= 1u << peer;
    }
    const uint32_t positions = args_.order.positions(token, present);
    // The peers' rows reach the cache as they land. The biases and this rank's own row are still in
    // memory.
    const int num_biases = take_biases(args_, token, [&](int idx, const uint8_t* bias) {
      arch::bulk_prefetch(bias, args_.message.row_bytes);
      slot.rows[idx] = bias;
    });
    const auto slot_bytes = static_cast<int64_t>(args_.message.slot_bytes());
    int own_position = -1, own_row = 0;
    DC_UNROLL
    for (int peer = 0; peer < kMaxRanks; ++peer) {
      if ((present >> peer & 1u) == 0) continue;
      const int row = row_of[peer], position = positions >> (4 * peer) & 15u;
      const bool is_own = peer == rank;
      if (is_own) {
        own_row = own_first_ + row;
        own_position = position;
      }
      slot.rows[num_biases + position] =
          entry_->window.first_rows[peer] + row * (is_own ? args_.message.row_bytes : slot_bytes);
      if (!is_own || (kIsExpanded && !arch::fault(Fault::kSkipSums))) await_row(peer, row);
    }
    if (!kIsExpanded && own_position >= 0) {
      arch::bulk_prefetch(args_.x + static_cast<int64_t>(own_row) * args_.message.row_bytes,
                          args_.message.row_bytes);
    }
    slot.num_biases = num_biases;
    slot.num_rows = num_biases + arch::popc(present);
    slot.own_position = own_position;
    slot.own_row = own_row;
    slot.token = token;
    token_ = token;
  }

  // Passes tokens whose rows have all arrived to the teams, in turn.
  DC_DEVICE void pass_on_ready() {
    const bool is_ready = is_pending() && pending_ == 0;
    const uint32_t ready = arch::ballot(kFullMask, is_ready);
    if (ready == 0) return;
    const int lane = arch::lane_idx();
    if (is_ready) {
      const uint32_t index = num_ready_ + arch::popc(ready & ((1u << lane) - 1));
      entry_->window.ready[index % TokenWindow::kNumReady] = lane;
      arch::st_relaxed_cta(&entry_->num_using[lane], static_cast<uint32_t>(team_size_));
      token_ = -1;
    }
    num_ready_ += arch::popc(ready);
    arch::sync_warp();  // what the lanes have written, and their acquires
    // pairs with: add_ready — the slots, and the rows that they name
    if (lane == 0) arch::st_release_cta(&entry_->num_ready, num_ready_);
  }

  const Context& context_;
  const CombineArgs& args_;
  CombineEntry* entry_;
  uint32_t* counter_;
  int per_channel_;
  int own_first_;
  int team_size_;
  uint32_t num_firsts_;                    // tokens that the counter does not deal
  const uint64_t* words_[kMaxRanks] = {};  // of the chunks with this lane's token
  uint32_t pending_ = 0;                   // ranks whose rows of it have not arrived yet
  int token_ = -1;                         // not passed on yet
  uint32_t num_ready_ = 0;
  uint32_t num_using_ = 0;
  uint64_t seen_ = 0;
  int speaker_ = 0;
  bool has_firsts_ = false;
  bool is_exhausted_ = false;
};

template <bool kIsExpanded>
DC_DEVICE bool may_go_on(const WatchContext<kIsExpanded>& context, const WaitFor&, uint64_t,
                         uint64_t, uint64_t patience, WaitClock* clock) {
  return context.watch.may_go_on_all(patience, clock);
}

// One warp of a team: adds its columns of every token that the team gets.
template <Dtype kDtype>
DC_DEVICE void add_ready(const Context& context, const CombineArgs& args, CombineEntry* entry,
                         int adder) {
  const AddTeams teams = AddTeams::of(args);
  const int team = adder / teams.size, member = adder - team * teams.size;
  if (team >= teams.num_teams) return;
  TokenWindow& window = entry->window;
  uint32_t num_ready = 0;
  for (uint32_t index = team;; index += teams.num_teams) {
    if (num_ready <= index && (num_ready & TokenWindow::kAll) == 0) {
      bool ok = true;
      if (arch::lane_idx() == 0) {
        // pairs with: TokenWatch::pass_on_ready — the slots, and the rows that they name
        ok = await<Scope::kCta>(
            context, &entry->num_ready, {Stage::kRetire, Word::kProgress, args.world.rank, -1},
            index + 1, [=](uint32_t value) { return value > index; },  // or kAll, which is more
            &num_ready);
      }
      arch::sync_warp();  // hands the leader's acquire to the whole warp
      if (arch::shfl(kFullMask, static_cast<int>(ok), 0) == 0) return;
      num_ready = arch::shfl(kFullMask, num_ready, 0);
    }
    if ((num_ready & ~TokenWindow::kAll) <= index) return;
    const int slot_idx = window.ready[index % TokenWindow::kNumReady];
    const TokenWindow::Slot& slot = window.slots[slot_idx];
    const int64_t offset = static_cast<int64_t>(slot.token) * args.message.row_bytes;
    reduce_rows<kDtype>(args.combined_x + offset, slot.rows, slot.num_rows,
                        args.message.row_bytes / 16, member, teams.size);
    // The members take turns: their columns cost them two trips to memory at most, the weights one.
    if (args.message.num_topk != 0 && member == index / teams.num_teams % teams.size) {
      add_weights(args, slot.rows + slot.num_biases, slot.num_rows - slot.num_biases,
                  slot.own_position, slot.own_row, slot.token);
    }
    arch::sync_warp();  // all lanes have read the slot
    if (arch::lane_idx() == 0) {
      // pairs with: TokenWatch::is_free — the reads of the slot
      arch::atomic_add_acq_rel_cta(&entry->num_using[slot_idx], 0xffffffffu);
    }
  }
}

}  // namespace deep_comm
