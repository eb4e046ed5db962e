// The control words at the start of every rank's heap segment, and what a kernel needs to find
// them.
//
//   segment = [ LocalState | arrived | recv lines | send lines | counts | low-latency words
//               | shrink barrier words | data region (rings, receive region) ]
//             [ low-latency region, at the end, if there is one ]
//
// No word is ever reset. Each carries the generation of the kernel that wrote it, and a word of an
// older generation reads as "not yet". See csrc/device/intranode/README.md for the picture.
#pragma once

#include "device/arch/types.cuh"
#include "device/layout/low_latency_words.cuh"
#include "device/layout/names.cuh"
#include "device/layout/region.cuh"
#include "device/layout/trace.cuh"

namespace deep_comm {

inline constexpr int kMaxChannels = 256;  // one block each: more than any GPU has SMs
inline constexpr int kMaxTopk = 2 * kWarpSize;
inline constexpr int kMaxLowLatencyTokens = 0xffff;  // of a rank: kernels pack their numbers
inline constexpr int kChunksOfLine = 8;
inline constexpr int kNumHeaderFields = 16;

// A 32-bit value and its generation, in one word that is written and read at once.
struct Tagged {
  uint32_t value;
  uint32_t generation;

  DC_HOST_DEVICE static uint64_t pack(uint32_t generation, uint32_t value) {
    return static_cast<uint64_t>(generation) << 32 | value;
  }
  DC_HOST_DEVICE static Tagged unpack(uint64_t word) {
    return {static_cast<uint32_t>(word), static_cast<uint32_t>(word >> 32)};
  }
  // Generations wrap around, so they are compared by distance.
  DC_HOST_DEVICE bool has_reached(uint32_t wanted) const {
    return static_cast<int32_t>(generation - wanted) >= 0;
  }
};

// The generation after this one. 0 is skipped: unwritten words hold it. 1 is skipped after the
// last, so that even and odd ones alternate (World::counts).
DC_HOST_DEVICE constexpr uint32_t next_generation(uint32_t generation) {
  return generation == 0xffffffffu ? 2 : generation + 1;
}

// Work that warps of the running kernel have taken.
struct TakenWork {
  uint32_t num_tokens;
  // 0: what a kernel deals besides. Combine between nodes: the last rank of the node, too.
  uint32_t num_chunks[kMaxRanks];
};

// Words of this rank alone; no peer touches them.
struct LocalState {
  uint32_t generation;          // of the last kernel that has closed it, and may still run
  uint32_t num_retired_blocks;  // of the running kernel: see sync/generation.cuh
  uint32_t abort;               // set once by the first failing thread; every wait polls it
  uint32_t error_claimed;       // the thread that turns it from 0 to 1 writes the error record
  // get_dispatch_layout has seen an index out of range since the last notify
  uint32_t bad_expert_index;
  uint32_t layout_ticket;  // blocks of a layout or notify kernel that have added their counts
  uint32_t blamed;         // two tiers: the rank that a failed neighbour waited for, plus one
  uint64_t notified;       // Tagged: NotifyResult of the last notify_dispatch
  // By parity of a kernel's generation; those of the next kernel are zero.
  TakenWork taken[2];
  // Tagged: an expanded dispatch runs, in this DispatchMode. From its entry until the end of the
  // expand_rows behind it, whose last block zeroes both words.
  uint64_t expanding;
  uint32_t num_retired_expanding;  // blocks of expand_rows that have read it
};

// What notify_dispatch tells the dispatch after it. The same on all ranks, unless one has timed
// out.
enum class NotifyResult : uint32_t {
  kNotDirect,  // some rank has announced no room for its rows
  kDirect,     // rows may be written to the announced outputs without another barrier
  kFailed,     // nothing may be sent
};

// Written by the sender of a channel into its receiver's segment.
struct alignas(kLineBytes) RecvLine {
  uint64_t tail;          // Tagged: slots filled
  uint64_t start_offset;  // Tagged: rows of lower channels from this source
  uint64_t end_offset;    // Tagged: start_offset + rows of this channel
  // Staged combine and expanded direct dispatch, which have no channels. Tagged: chunk line *
  // kChunksOfLine + i has landed; of a dispatch, LandedRows. Of expanded rows also from this rank to
  // itself.
  uint64_t landed[kChunksOfLine];
  // Direct dispatch, whose blocks are numbered like channels. Tagged: everything that the source's
  // block sends has landed.
  uint64_t done;
  // Expanded direct dispatch, line 0. Tagged: tokens of the source.
  uint64_t num_tokens;
};
// Written by the receiver of a channel into its sender's segment.
struct alignas(kLineBytes) SendLine {
  uint64_t head;  // Tagged: slots read
};
static_assert(sizeof(RecvLine) == kLineBytes && sizeof(SendLine) == kLineBytes);

// What one rank announces to another about a kernel as a whole; all Tagged.
struct alignas(kLineBytes) ArrivedLine {
  uint64_t arrived;  // it has entered; value = operation signature
  // dispatch: first line of its output block, from its segment's start; 0: none
  uint64_t output_line;
  uint64_t src_line;     // the same for its source tokens
  uint64_t output_rows;  // dispatch: rows its output has
  // combine, by parity of the generation: a peer without tokens may be one kernel further when this
  // is read.
  uint64_t staging_line[2];  // first line of its staging, from its segment's start; 0: none
  uint64_t staging_rows[2];  // rows that it has room for
};
static_assert(sizeof(ArrivedLine) == kLineBytes);

// What a rank tells another in a shrink barrier (intranode/shrink_barrier.cuh). Tagged: the
// barrier's number, and the ranks to be left out.
struct alignas(kLineBytes) ProposalLine {
  uint64_t proposal;
};
static_assert(sizeof(ProposalLine) == kLineBytes);

// What the first failing thread leaves behind, in host memory that kernels reach.
struct ErrorBlock {
  uint32_t is_written;  // released last
  uint32_t kind;        // ErrorKind
  uint32_t kernel;      // Kernel
  uint32_t stage;       // Stage
  uint32_t word;        // Word
  int32_t rank;
  int32_t peer;
  int32_t channel;
  uint64_t seen;
  uint64_t expected;
  uint64_t waited_ns;
  int64_t index;  // expert_index: position in topk_idx
};

struct WorkspaceLayout {
  size_t arrived;     // ArrivedLine [num_ranks], by peer
  size_t recv_lines;  // RecvLine [kMaxChannels, num_ranks], by source
  size_t send_lines;  // SendLine [kMaxChannels, num_ranks], by destination
  // int32 [2, num_ranks, counts_stride], by parity of the generation and source: header, then
  // counts per rank and per local expert
  size_t counts;
  size_t counts_stride;
  size_t expert_counts;  // int32 [2, num_ranks, num_max_experts], likewise: counts of every expert
  int num_max_experts;
  // int32 [num_ranks + num_max_experts]: accumulators of layout and notify kernels, zero at rest
  size_t layout_counts;
  LowLatencyWords low_latency;
  size_t data;  // rings; its size is the user's num_nvl_bytes

  // The last words before the data survive a reset among some of the ranks, because others may be
  // writing there: ProposalLine [num_ranks], by peer, and a line with masked_out (uint32): the
  // other ranks have masked this one.
  DC_HOST_DEVICE static constexpr size_t num_proposal_bytes(int num_ranks) {
    return sizeof(ProposalLine) * static_cast<size_t>(num_ranks + 1);
  }
  DC_HOST_DEVICE constexpr size_t proposals(int num_ranks) const {
    return data - num_proposal_bytes(num_ranks);
  }
  DC_HOST_DEVICE constexpr size_t masked_out() const { return data - sizeof(ProposalLine); }

  DC_HOST_DEVICE static constexpr WorkspaceLayout make(int num_ranks, int num_max_experts) {
    WorkspaceLayout layout{};
    RegionCursor cursor;
    cursor.take(sizeof(LocalState));
    layout.arrived = cursor.take(sizeof(ArrivedLine) * num_ranks);
    layout.recv_lines = cursor.take(sizeof(RecvLine) * kMaxChannels * num_ranks);
    layout.send_lines = cursor.take(sizeof(SendLine) * kMaxChannels * num_ranks);
    layout.counts_stride = align_up<size_t>(
        kNumHeaderFields + num_ranks + ceil_div(num_max_experts, num_ranks), kLineBytes / 4);
    layout.counts = cursor.take(2 * layout.counts_stride * 4 * num_ranks);
    layout.num_max_experts = num_max_experts;
    layout.expert_counts = cursor.take(2 * static_cast<size_t>(num_max_experts) * 4 * num_ranks);
    layout.layout_counts = cursor.take(static_cast<size_t>(num_ranks + num_max_experts) * 4);
    layout.low_latency = LowLatencyWords::make(&cursor, num_ranks, num_max_experts);
    layout.data = align_up<size_t>(cursor.num_bytes() + num_proposal_bytes(num_ranks), 4096);
    return layout;
  }
};

// One rank's view of the job; passed by value in every kernel's arguments.
struct World {
  int rank;
  int num_ranks;
  // These two follow what every kernel reads first. So testing for tracing, or for absent ranks,
  // fetches nothing more, and the arguments after them keep their offsets.
  TraceSlot* trace_slots;
  uint32_t last_traced_call;
  // Ranks that normal mode leaves out, a bit each; equal on all other ranks. Nothing is sent to
  // them or awaited from them. Nobody holds their experts.
  uint32_t absent;
  uint8_t* bases[kMaxRanks];  // every rank's segment, as this rank addresses it
  WorkspaceLayout layout;
  ErrorBlock* error;
  uint64_t timeout_ns;

  DC_HOST_DEVICE Trace trace() const { return {trace_slots, last_traced_call}; }
  DC_HOST_DEVICE bool is_absent(int peer) const { return (absent >> peer & 1u) != 0; }
  DC_HOST_DEVICE bool takes_part(int peer) const { return peer < num_ranks && !is_absent(peer); }
  DC_HOST_DEVICE LocalState* state() const { return reinterpret_cast<LocalState*>(bases[rank]); }
  // The words in `owner`'s segment by which `from` announces itself.
  DC_HOST_DEVICE ArrivedLine* arrived_line(int owner, int from) const {
    return reinterpret_cast<ArrivedLine*>(bases[owner] + layout.arrived) + from;
  }
  DC_HOST_DEVICE uint64_t* arrived(int owner, int from) const {
    return &arrived_line(owner, from)->arrived;
  }
  DC_HOST_DEVICE RecvLine* recv_line(int owner, int channel, int source) const {
    return reinterpret_cast<RecvLine*>(bases[owner] + layout.recv_lines) + channel * num_ranks +
           source;
  }
  DC_HOST_DEVICE SendLine* send_line(int owner, int channel, int destination) const {
    return reinterpret_cast<SendLine*>(bases[owner] + layout.send_lines) + channel * num_ranks +
           destination;
  }
  // Of the notify of that generation. The notify before used another row: if a notify failed on all
  // ranks, the next one may run while a slow rank still reads.
  DC_HOST_DEVICE int32_t* counts(int owner, int source, uint32_t generation) const {
    return reinterpret_cast<int32_t*>(bases[owner] + layout.counts) +
           static_cast<size_t>((generation & 1) * num_ranks + source) * layout.counts_stride;
  }
  DC_HOST_DEVICE int32_t* expert_counts(int owner, int source, uint32_t generation) const {
    return reinterpret_cast<int32_t*>(bases[owner] + layout.expert_counts) +
           (static_cast<size_t>(generation % 2) * num_ranks + source) * layout.num_max_experts;
  }
  DC_HOST_DEVICE int32_t* layout_counts() const {
    return reinterpret_cast<int32_t*>(bases[rank] + layout.layout_counts);
  }
  DC_HOST_DEVICE LowLatencyState* low_latency_state() const {
    return reinterpret_cast<LowLatencyState*>(bases[rank] + layout.low_latency.state);
  }
  // The word in `owner`'s segment by which `from` says that it has begun a low-latency operation.
  DC_HOST_DEVICE uint64_t* announced(int owner, LowLatencyKind kind, int buffer_idx,
                                     int from) const {
    return reinterpret_cast<uint64_t*>(bases[owner] + layout.low_latency.announced) +
           (static_cast<size_t>(kind) * 2 + buffer_idx) * kMaxRanks + from;
  }
  DC_HOST_DEVICE int32_t* masked(int peer) const {
    return reinterpret_cast<int32_t*>(bases[rank] + layout.low_latency.masked) + peer;
  }
  // In `owner`'s segment: `from` has masked `peer`.
  DC_HOST_DEVICE int32_t* vote(int owner, int from, int peer) const {
    return reinterpret_cast<int32_t*>(bases[owner] + layout.low_latency.votes) + from * kMaxRanks +
           peer;
  }
  // The number by which `rank` shows `owner` that it is alive: see sync/mask.cuh.
  DC_HOST_DEVICE uint64_t* alive(int owner, int rank) const {
    return reinterpret_cast<uint64_t*>(bases[owner] + layout.low_latency.alive) + rank;
  }
  DC_HOST_DEVICE uint64_t* proposal(int owner, int from) const {
    return &(reinterpret_cast<ProposalLine*>(bases[owner] + layout.proposals(num_ranks)) + from)
                ->proposal;
  }
  DC_HOST_DEVICE uint32_t* masked_out(int owner) const {
    return reinterpret_cast<uint32_t*>(bases[owner] + layout.masked_out());
  }
  DC_HOST_DEVICE uint8_t* data(int owner) const { return bases[owner] + layout.data; }
};

}  // namespace deep_comm
