// The one door from the kernels to the hardware. Every kernel reaches memory that another thread
// can see, its warp, its block, the bulk-copy engine and the clock through `deep_comm::arch`, and
// nothing else.
//
//   cuda*.cuh  PTX and CUDA intrinsics (the only files with either)
//   host*.cuh  the same names over the SIMT executor of csrc/simt/
//
// Naming: `op_order_scope`. Scope is always spelled: cta (block), gpu (all blocks of one rank),
// sys (all ranks, NICs, the host). T is any trivially copyable type of 1, 2, 4, 8 or 16 bytes
// (16: Vec16; only weak, nc and relaxed sys accesses), naturally aligned.
//
// ---- identity -----------------------------------------------------------------------------------
//   int thread_idx(), num_threads();        // in the block; blocks and grids are one-dimensional
//   int block_idx(), num_blocks();
//   int lane_idx(), warp_idx(), num_warps();
//   uint8_t* dynamic_smem();                // 128-byte aligned
//
// ---- memory -------------------------------------------------------------------------------------
//   T    ld_weak(const T*)                  // ordered by nothing but barriers and acquires
//   void st_weak(T*, T)                     // a peer sees it after a release, or any time before
//   T    ld_nc(const T*)                    // input that nobody writes during this kernel
//   void st_streaming(T*, T)                // st_weak that asks not to stay in L1; payload only
//   T    ld_relaxed_{cta,gpu,sys}(const T*),  void st_relaxed_{cta,gpu,sys}(T*, T)
//        sys also takes Vec16: four words of 4 bytes, each relaxed and arriving by itself
//   T    ld_acquire_{cta,gpu,sys}(const T*),  void st_release_{cta,gpu,sys}(T*, T)
//   T    atomic_add_{relaxed,acq_rel}_{cta,gpu,sys}(T*, T)  -> old value   (int32, uint32, uint64)
//   T    atomic_cas_acq_rel_{cta,gpu,sys}(T*, T expected, T desired) -> old  (uint32, uint64)
//   T    atomic_increment_relaxed_gpu(T*) -> old, for which no lane waits        (uint32)
//   T    atomic_or_relaxed_gpu(T*, T) -> old                                 (uint32)
//   void fence_acq_rel_{cta,gpu,sys}()
//   void fence_proxy_async_shared(), fence_proxy_async_global(), fence_proxy_async()
//                                           // order generic accesses of this thread with bulk
//                                           // copies it issues afterwards
//   Shared memory is ordinary C++ memory for its block: plain loads and stores, ordered by the
//   block and warp barriers below. Words in shared memory on which a warp waits
//   use the `_cta` forms.
//
// ---- warp (mask: the lanes that take part; every one of them must make the call) ----------------
//   void     sync_warp(uint32_t mask = kFullMask)
//   T        shfl(uint32_t mask, T, int src_lane), shfl_xor(mask, T, int lane_mask),
//            shfl_up(mask, T, int delta), shfl_down(mask, T, int delta)      (4 or 8 bytes)
//   uint32_t ballot(uint32_t mask, bool);  bool any(mask, bool);  bool all(mask, bool)
//   uint32_t match_any(uint32_t mask, T)                                      (4 or 8 bytes)
//   int      popc(uint32_t), ffs(uint32_t)      // ffs: 1-based, 0 for none;   int clz(uint32_t)
//   bool     elect_one()                    // true in exactly one lane of a converged full warp
//
// ---- block --------------------------------------------------------------------------------------
//   void sync_block()                       // every thread of the block that has not exited, all
//                                           // of them at this place of the code
//   void sync_block_apart()                 // the same, but warps may stand at different places
//   bool sync_block_any(bool)               // the same; was it true in any of them?
//   void sync_named(int barrier, int num_threads)   // barrier 1..15, num_threads a multiple of 32
//   void arrive_named(int barrier, int num_threads)
//
// ---- bulk copies (one thread issues; addresses and sizes are multiples of 16 bytes) -------------
//   using Mbarrier = uint64_t  (in shared memory)
//   void mbarrier_init(Mbarrier*, int num_arrivals)
//   void fence_mbarrier_init()              // after the inits, before a barrier publishes them
//   void mbarrier_arrive(Mbarrier*)
//   void mbarrier_arrive_expect_tx(Mbarrier*, uint32_t num_bytes) // one arrival, bytes to wait for
//   bool mbarrier_try_wait_parity(Mbarrier*, uint32_t parity)    // has that phase completed?
//   void bulk_load(void* smem_dst, const void* global_src, uint32_t num_bytes, Mbarrier*)
//   void bulk_store(void* global_dst, const void* smem_src, uint32_t num_bytes)
//   void bulk_prefetch(const void* global_src, uint32_t num_bytes): into the L2 cache; a hint
//   void bulk_commit()                      // closes a group of this thread's bulk stores
//   void bulk_wait_read<N>()                // all but the newest N groups have read shared memory
//   void bulk_wait<N>()                     // all but the newest N groups have written: visible to
//                                           // this thread, and to others by its next release
//
// ---- rail: the network between nodes (offsets from the start of the peer's segment) -------------
//   void rail_put(const RailPort&, int peer, int qp, size_t dst_offset, const void*
//   src, uint32_t num_bytes)
//        One thread. The source lies in this rank's segment and stays as it is until the peer has
//        told that it came. It is read past this thread's caches: a fence of scope sys stands
//        between the stores that fill it and the put.
//   void rail_put_warp(...)                 // the same, by a converged warp, arguments equal in all lanes
//   void rail_signal(const RailPort&, int peer, int qp, size_t word_offset, uint64_t value)
//        One thread. Writes a word after all earlier puts and signals of this queue (peer, qp) that
//        this thread has posted or that it knows of by an acquire or a barrier. An acquire of the
//        word shows them. Between queues, and against stores over NVLink, nothing is ordered.
//   uint8_t* rail_near(const RailPort&, int peer)
//        The peer's segment, if ordinary stores of this rank reach it, else null; the same in
//        every call. What is stored there is ordered by releases, and not against puts and signals
//        to the same peer.
//   void rail_count(const RailPort&, int peer, int qp, uint64_t num_bytes)   // stored instead of put
//   void rail_done(const RailPort&)
//        One thread of every block, or of none: this block posts nothing more, nor does any thread
//        that has not met this one yet. A hint: the host may go on once all of it has left.
//
// ---- launches -----------------------------------------------------------------------------------
//   void await_earlier_launch()  // kernels that begin early: until the launch before this one in
//        the stream has ended and all it wrote can be seen. Nothing that it or a launch before it
//        writes may be read, and nothing that they read written, before this.
//   void allow_later_launch()    // the next launch, if it is of a kernel that begins early, may
//        begin as soon as all blocks of this one have called this and there is room. Says nothing
//        about what this one has written.
//
// ---- waiting, time ------------------------------------------------------------------------------
//   void wait_hint(const T* word, T seen, const uint32_t* abort_word, uint64_t deadline_ns)
//        Between two polls of `word` (4 or 8 bytes). CUDA: nothing, or a short sleep. Host: the
//        fiber is parked until *word != seen, *abort_word != 0 or the clock passes deadline_ns. May
//        return early.
//   void     wait_note(const WaitNote&)     // host: what this fiber waits for, to be printed
//   uint64_t globaltimer_ns();  void nanosleep(uint32_t ns)
//   [[noreturn]] void trap(const char* why) // a broken invariant; never the error path
//
// ---- numbers ------------------------------------------------------------------------------------
//   float bf16_to_float(Bf16), fp16_to_float(Fp16)
//   Bf16 float_to_bf16(float);  Fp16 float_to_fp16(float)
//        (round to nearest even; NaN stays NaN)
//   uint16_t floats_to_e4m3x2(float low, float high)  // nearest even, at most 448; low byte first
//   uint32_t max_bf16x2(uint32_t, uint32_t)  // two bfloat16 each, not negative; a NaN loses
//   float log2(float), exp2(float)          // good to about 2^-21 of 1 and of the result; the
//                                           // targets differ in the last bits
//   float multiply(float, float)            // rounded by itself: never fused with an addition
//   float reciprocal(float)                 // wrong by one unit in the last place at most
//
// ---- faults (negative controls) -----------------------------------------------------------------
//   constexpr/inline bool fault(Fault)      // false on CUDA, always. On the host: whether the
//        simulated machine was told to run the protocol with this step left out, so that a test can
//        show that the simulation notices. See csrc/simt/README.md.
#pragma once

#include "types.cuh"

namespace deep_comm {

// What a waiting thread waits for; strings are literals. Printed by the host executor, ignored by
// CUDA.
struct WaitNote {
  const char* kernel;
  const char* stage;
  const char* word;
  int rank;
  int peer;
  int channel;
  uint64_t expected;
};

// Steps that a test can leave out of a protocol run on the simulated machine.
enum class Fault : uint32_t {
  kNone = 0,
  kWeakenRelease = 1u << 0,     // st_release_* and releasing atomics order nothing before them
  kWeakenFence = 1u << 1,       // fence_acq_rel_* does nothing
  kSkipCredit = 1u << 2,        // ring senders do not wait for a free slot, nor combine's watch
  kSkipBulkWait = 1u << 3,      // bulk_wait<N> returns at once
  kSkipBulkWaitRead = 1u << 4,  // bulk_wait_read<N> returns at once
  kSkipEntryBarrier = 1u << 5,  // a kernel writes into peers' memory without waiting for them
  kSkipArrival = 1u << 6,     // words that tell by themselves that they came are taken as they are
  kSkipClear = 1u << 7,       // and stay where they are when they have been taken
  kReorderRail = 1u << 8,     // signals overtake the puts before them
  kSkipRailCredit = 1u << 9,  // rail senders do not wait for a free slot
  kEarlyRailCredit = 1u << 10,  // rail receivers free slots that they have not read
  kSkipRailFence = 1u << 11,    // no fence between filling a slot and putting it
  kPlainWords = 1u << 12,       // rows travel as they are, zeros as zeros
  kSkipLaunchWait = 1u << 13,   // await_earlier_launch returns at once
  kSkipVote = 1u << 14,         // who masks a rank keeps it to itself
  kSkipAgreement = 1u << 15,    // each block finds out by itself whose rows it places
  kSharedRows = 1u << 16,       // combine's rows lie where another rank's may come after a mask
  kSkipAlive = 1u << 17,        // who waits for a silent rank is silent itself
  kPackedSources = 1u << 18,    // where low-latency sources have their places depends on the shape
  kEarlyRailDone = 1u << 19,    // blocks say that they post nothing more, and post
  kAwaitAbsent = 1u << 20,      // entry waits for ranks that the others do without
};

}  // namespace deep_comm

#if DEEP_COMM_TARGET_CUDA
#include "cuda.cuh"
#else
#include "host.cuh"
#endif
