// The only door from the kernels to the hardware. A kernel uses `deep_comm::arch` and nothing else
// to reach memory that another thread can see, its warp, its block, the bulk-copy engine and the
// clock.
//
//   cuda*.cuh  PTX and CUDA intrinsics (the only files with either); of what sm_80 lacks,
//              cuda_sm80.cuh has the same names as cuda_sm90.cuh
//   host*.cuh  the same names over the SIMT executor of csrc/simt/
//
// Naming: `op_order_scope`. The scope is always spelled: cta (block), gpu (all blocks of one rank),
// sys (all ranks, NICs, the host). T is any trivially copyable type of 1, 2, 4, 8 or 16 bytes,
// naturally aligned. 16 bytes means Vec16, for weak, nc and relaxed sys accesses only.
//
// ---- identity -----------------------------------------------------------------------------------
//   int thread_idx(), num_threads();        // in the block; blocks and grids are one-dimensional
//   int block_idx(), num_blocks();
//   int lane_idx(), warp_idx(), num_warps();
//   uint8_t* dynamic_smem();                // 128-byte aligned
//
// ---- memory -------------------------------------------------------------------------------------
//   T    ld_weak(const T*)                  // ordered by barriers and acquires only
//   void st_weak(T*, T)                     // a peer sees it after a release at the latest
//   T    ld_nc(const T*)                    // input that nobody writes during this kernel
//   void st_streaming(T*, T)                // st_weak with a hint not to stay in L1; payload only
//   T    ld_relaxed_{cta,gpu,sys}(const T*),  void st_relaxed_{cta,gpu,sys}(T*, T)
//        sys also takes Vec16: four words of 4 bytes, each relaxed, each arriving separately
//   T    ld_acquire_{cta,gpu,sys}(const T*),  void st_release_{cta,gpu,sys}(T*, T)
//   T    atomic_add_{relaxed,acq_rel}_{cta,gpu,sys}(T*, T)  -> old value   (int32, uint32, uint64)
//   T    atomic_cas_relaxed_{cta,gpu}(T*, T expected, T desired) -> old  (uint32, uint64)
//   T    atomic_increment_relaxed_gpu(T*) -> old; no lane waits for it             (uint32)
//   T    atomic_or_relaxed_gpu(T*, T) -> old                                 (uint32)
//   void fence_acq_rel_{cta,gpu,sys}()
//   void fence_proxy_async_shared(), fence_proxy_async_global(), fence_proxy_async()
//                                           // order generic accesses of this thread with bulk
//                                           // copies it issues afterwards
//   Vec16 multimem_add_relaxed_sys<T>(const Multicast&)   (T: Bf16, Fp16, float)
//        All ranks' vectors there, added in float32 and rounded; nobody says in which order.
//   void multimem_st_relaxed_sys(const Multicast&, Vec16)   // to every rank's
//   void fence_proxy_alias()
//        A Multicast is another address of the same memory, and acquires say nothing about another
//        address: this must stand between an access of one and an access of the other, on the way
//        from thread to thread. sm_80 has no multicast.
//   Shared memory is ordinary C++ memory for its block: plain loads and stores, ordered by the
//   block and warp barriers below. Words on which a warp waits there use the `_cta` forms.
//
// ---- warp (mask: the lanes that take part; each of them must make the call) ---------------------
//   void     sync_warp(uint32_t mask = kFullMask)
//   T        shfl(uint32_t mask, T, int src_lane), shfl_xor(mask, T, int lane_mask),
//            shfl_up(mask, T, int delta), shfl_down(mask, T, int delta)      (4 or 8 bytes)
//   uint32_t ballot(uint32_t mask, bool);  bool any(mask, bool);  bool all(mask, bool)
//   uint32_t match_any(uint32_t mask, T)                                      (4 or 8 bytes)
//   uint32_t reduce_or(kFullMask, uint32_t);  int reduce_max(kFullMask, int)       (all 32 lanes)
//   int      popc(uint32_t), ffs(uint32_t)      // ffs: 1-based, 0 for none;   int clz(uint32_t)
//   bool     elect_one()                    // true in exactly one lane of a converged full warp
//
// ---- block --------------------------------------------------------------------------------------
//   void sync_block()                       // every thread of the block that has not exited, all
//                                           // at the same place in the code
//   void sync_block_apart()                 // the same, but warps may be at different places
//   bool sync_block_any(bool)               // the same; true if it was true in any thread
//   void sync_named(int barrier, int num_threads)   // barrier 1..15, num_threads a multiple of 32
//   void arrive_named(int barrier, int num_threads)
//
// ---- bulk copies (one thread issues; addresses and sizes are multiples of 16 bytes) -------------
//   using Mbarrier = uint64_t  (in shared memory)
//   void mbarrier_init(Mbarrier*, int num_arrivals)
//   void fence_mbarrier_init()              // after the inits, before a barrier publishes them
//   void mbarrier_arrive(Mbarrier*)
//   bool mbarrier_try_wait_parity(Mbarrier*, uint32_t parity)    // has that phase completed?
//   void bulk_load(void* smem_dst, const void* global_src, uint32_t num_bytes, Mbarrier*)
//                                           // one arrival, that counts once the bytes have landed
//   void bulk_store(void* global_dst, const void* smem_src, uint32_t num_bytes)
//   void bulk_prefetch(const void* global_src, uint32_t num_bytes): into the L2 cache; a hint
//   void bulk_commit()                      // closes a group of this thread's bulk stores
//   void bulk_wait_read<N>()                // all but the newest N groups have read shared memory
//   void bulk_wait<N>()                     // all but the newest N groups have written: visible to
//                                           // this thread, and to others by its next release
//
// ---- rail: the network between nodes (offsets from the start of the peer's segment) -------------
//   void rail_put(const RailPort&, int peer, int qp, size_t dst_offset, const void* src,
//                 uint32_t num_bytes)
//        One thread. The source is in this rank's segment. It must not change until the peer has
//        announced that it has arrived. The NIC reads past this thread's caches, so a fence of
//        scope sys must stand between the stores that fill the source and the put.
//   void rail_put_warp(...)                 // the same by a converged warp, arguments equal
//   void rail_signal(const RailPort&, int peer, int qp, size_t word_offset, uint64_t value)
//        One thread. Writes a word after all earlier puts and signals of this queue (peer, qp) that
//        this thread has posted or knows of by an acquire or a barrier. An acquire of the word
//        makes them visible. Nothing is ordered between queues, nor against stores over NVLink.
//   uint8_t* rail_near(const RailPort&, int peer)
//        The peer's segment if ordinary stores of this rank reach it, else null; the same in every
//        call. Releases order what is stored there, but not against puts and signals to that
//        peer.
//   void rail_count(const RailPort&, int peer, int qp, uint64_t num_bytes)  // stored, not put
//   void rail_done(const RailPort&)
//        One thread of every block, or of none. This block posts nothing more, nor does any thread
//        that has not synchronised with this one yet. A hint: the host may go on once everything
//        posted has left.
//
// ---- launches -----------------------------------------------------------------------------------
//   void await_earlier_launch()  // kernels that begin early or beside the launch before them:
//        waits until that launch has ended and all its writes are visible. Before this call a
//        kernel must not read what that launch writes, nor write what it reads, unless words order
//        the two.
//   void allow_later_launch()    // the next launch, if its kernel begins early or beside this one,
//        may begin as soon as a thread of every block has called this and there is room. It says
//        nothing about what this launch has written.
//
// ---- waiting, time ------------------------------------------------------------------------------
//   void wait_hint(const T* word, T seen, const uint32_t* abort_word, uint64_t deadline_ns)
//        Between two polls of `word` (4 or 8 bytes). CUDA: nothing, or a short sleep. Host: the
//        fiber is parked until *word != seen, *abort_word != 0 or the clock passes deadline_ns. It
//        may return early.
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
//   float log2(float), exp2(float)          // error about 2^-21 of 1, or of the result; the
//                                           // targets differ in the last bits
//   float multiply(float, float)            // rounded on its own: never fused with an addition
//   float reciprocal(float)                 // error at most one unit in the last place
//
// ---- faults (negative controls) -----------------------------------------------------------------
//   constexpr/inline bool fault(Fault)      // false on CUDA, always. On the host: true if the
//        simulated machine was told to leave out this step of the protocol. So a test can show that
//        the simulation notices. See csrc/simt/README.md.
#pragma once

#include "types.cuh"

namespace deep_comm {

// What a waiting thread waits for; strings are literals. The host executor prints it, CUDA ignores
// it.
struct WaitNote {
  const char* kernel;
  const char* stage;
  const char* word;
  int rank;
  int peer;
  int channel;
  uint64_t expected;
};

// Steps of a protocol that a test can leave out on the simulated machine.
enum class Fault : uint32_t {
  kNone = 0,
  kWeakenRelease = 1u << 0,     // st_release_* and releasing atomics order nothing before them
  kWeakenFence = 1u << 1,       // fence_acq_rel_* does nothing
  kSkipCredit = 1u << 2,        // ring senders do not wait for a free slot, nor combine's watch
  kSkipBulkWait = 1u << 3,      // bulk_wait<N> returns at once
  kSkipBulkWaitRead = 1u << 4,  // bulk_wait_read<N> returns at once
  kSkipEntryBarrier = 1u << 5,  // a kernel writes into peers' memory without waiting for them
  // words that tell by themselves whether they arrived are used as they are
  kSkipArrival = 1u << 6,
  kSkipClear = 1u << 7,         // and are not zeroed after use
  kReorderRail = 1u << 8,       // signals overtake the puts before them
  kSkipRailCredit = 1u << 9,    // rail senders do not wait for a free slot
  kEarlyRailCredit = 1u << 10,  // rail receivers free slots that they have not read
  kSkipRailFence = 1u << 11,    // no fence between filling a slot and putting it
  kPlainWords = 1u << 12,       // rows are sent unencoded, with zeros
  kSkipLaunchWait = 1u << 13,   // await_earlier_launch returns at once
  kSkipVote = 1u << 14,         // a rank that masks another does not tell the others
  kSkipAgreement = 1u << 15,    // each block decides by itself whose rows it places
  // without parts of their own: combine's rows of two ranks may use the same memory
  kSharedRows = 1u << 16,
  kSkipAlive = 1u << 17,         // a rank that waits for a silent rank is silent itself
  kPackedSources = 1u << 18,     // a low-latency source's part of a buffer depends on the shape
  kEarlyRailDone = 1u << 19,     // blocks announce that they post nothing more, and then post
  kAwaitAbsent = 1u << 20,       // entry waits for absent ranks
  kIgnoreGeneration = 1u << 21,  // words of earlier kernels count as words of this one
  kEarlyGeneration = 1u << 22,   // the first block to leave, not the last, ends the generation
  kSkipExitBarrier = 1u << 23,   // direct dispatch ends before its peers are done
  kEarlyCredit = 1u << 24,       // receivers inside a node free slots that they have not read
  kKeepProposal = 1u << 25,      // what a rank proposed before it gave up still counts
  kSkipBlame = 1u << 26,         // a rank does not tell its neighbours whom it blames
  kSkipSums = 1u << 27,          // combine adds sums of own expanded rows without waiting for them
  kEarlySums = 1u << 28,         // the first part of a chunk's sums counts as all of them
  kLostSums = 1u << 29,          // sums of expanded rows are made, but nobody hears of it
  kEarlyLanded = 1u << 30,       // expanded dispatch says that rows have landed when they are taken
  kReverseSums = 1u << 31,       // multimem_add begins with the last rank
};

}  // namespace deep_comm

#if DEEP_COMM_TARGET_CUDA
#include "cuda.cuh"
#else
#include "host.cuh"
#endif
