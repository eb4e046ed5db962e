// The primitives over the SIMT executor of csrc/simt/: every CUDA thread is a fiber.
#pragma once

#include "host_memory.cuh"

namespace deep_comm::arch {

using Mbarrier = uint64_t;

// ---- identity -------------------------------------------------------------------------

inline int thread_idx() { return simt::t_state.current->thread_idx; }
inline int num_threads() { return simt::grid_of(simt::t_state.current)->grid.num_threads; }
inline int block_idx() { return simt::block_of(simt::t_state.current)->index; }
inline int num_blocks() { return simt::grid_of(simt::t_state.current)->grid.num_blocks; }
inline int lane_idx() { return simt::t_state.current->lane; }
inline int warp_idx() { return simt::t_state.current->warp->index; }
inline int num_warps() { return simt::grid_of(simt::t_state.current)->num_warps_per_block; }
inline uint8_t* dynamic_smem() { return simt::block_of(simt::t_state.current)->smem.base; }

// ---- warp -----------------------------------------------------------------------------

namespace detail {

template <class T>
inline uint64_t to_bits(T value) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "warp values have 4 or 8 bytes");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <class T>
inline T from_bits(uint64_t bits) {
  T value;
  memcpy(&value, &bits, sizeof(T));
  return value;
}

template <class T>
inline T shuffle(simt::WarpOp op, uint32_t mask, T value, int argument) {
  return from_bits<T>(
      simt::warp_collective(op, mask, to_bits(value), static_cast<uint32_t>(argument)));
}

}  // namespace detail

inline void sync_warp(uint32_t mask = kFullMask, simt::CallSite site = simt::CallSite::here()) {
  if (detail::Site{"sync_warp", site}.is_left_out()) return;
  simt::warp_collective(simt::WarpOp::kSync, mask, 0, 0);
}
template <class T>
inline T shfl(uint32_t mask, T value, int src_lane) {
  return detail::shuffle(simt::WarpOp::kShfl, mask, value, src_lane);
}
template <class T>
inline T shfl_xor(uint32_t mask, T value, int lane_mask) {
  return detail::shuffle(simt::WarpOp::kShflXor, mask, value, lane_mask);
}
template <class T>
inline T shfl_up(uint32_t mask, T value, int delta) {
  return detail::shuffle(simt::WarpOp::kShflUp, mask, value, delta);
}
template <class T>
inline T shfl_down(uint32_t mask, T value, int delta) {
  return detail::shuffle(simt::WarpOp::kShflDown, mask, value, delta);
}
inline uint32_t ballot(uint32_t mask, bool predicate) {
  return static_cast<uint32_t>(simt::warp_collective(simt::WarpOp::kBallot, mask, predicate, 0));
}
inline bool any(uint32_t mask, bool predicate) {
  return simt::warp_collective(simt::WarpOp::kAny, mask, predicate, 0) != 0;
}
inline bool all(uint32_t mask, bool predicate) {
  return simt::warp_collective(simt::WarpOp::kAll, mask, predicate, 0) != 0;
}
template <class T>
inline uint32_t match_any(uint32_t mask, T value) {
  return static_cast<uint32_t>(
      simt::warp_collective(simt::WarpOp::kMatchAny, mask, detail::to_bits(value), 0));
}
// All 32 lanes.
inline uint32_t reduce_or(uint32_t mask, uint32_t value) {
  for (int step = 1; step < kWarpSize; step *= 2) value |= shfl_xor(mask, value, step);
  return value;
}
inline int reduce_max(uint32_t mask, int value) {
  for (int step = 1; step < kWarpSize; step *= 2) {
    const int other = shfl_xor(mask, value, step);
    value = value < other ? other : value;
  }
  return value;
}
inline int popc(uint32_t bits) { return __builtin_popcount(bits); }
inline int ffs(uint32_t bits) { return __builtin_ffs(static_cast<int>(bits)); }
inline int clz(uint32_t bits) { return bits ? __builtin_clz(bits) : 32; }
inline bool elect_one() {
  return simt::warp_collective(simt::WarpOp::kElect, kFullMask, 0, 0) != 0;
}

// ---- block ----------------------------------------------------------------------------

inline void sync_block(simt::CallSite site = simt::CallSite::here()) {
  if (!detail::Site{"sync_block", site}.is_left_out()) simt::sync_block(site);
}
inline void sync_block_apart(simt::CallSite site = simt::CallSite::here()) {
  if (!detail::Site{"sync_block_apart", site}.is_left_out()) simt::sync_block();
}
inline bool sync_block_any(bool predicate, simt::CallSite site = simt::CallSite::here()) {
  return simt::sync_block_any(predicate, site);
}
inline void sync_named(int barrier, int num_threads) { simt::sync_named(barrier, num_threads); }
inline void arrive_named(int barrier, int num_threads) { simt::arrive_named(barrier, num_threads); }

// ---- bulk copies ----------------------------------------------------------------------

inline void mbarrier_init(Mbarrier* barrier, int num_arrivals) {
  simt::mbarrier_init(barrier, num_arrivals);
}
inline void fence_mbarrier_init() {}  // an mbarrier is plain memory of its block here
inline void mbarrier_arrive(Mbarrier* barrier) { simt::mbarrier_arrive(barrier, 0); }
inline bool mbarrier_try_wait_parity(Mbarrier* barrier, uint32_t parity,
                                     simt::CallSite site = simt::CallSite::here()) {
  if (detail::Site{"mbarrier_try_wait_parity", site}.is_left_out()) return true;
  return simt::mbarrier_try_wait_parity(barrier, parity);
}
inline void bulk_load(void* smem_dst, const void* global_src, uint32_t num_bytes,
                      Mbarrier* barrier) {
  simt::bulk_load(smem_dst, global_src, num_bytes, barrier);
}
inline void bulk_prefetch(const void* /*global_src*/, uint32_t /*num_bytes*/) {}
inline void bulk_store(void* global_dst, const void* smem_src, uint32_t num_bytes) {
  simt::bulk_store(global_dst, smem_src, num_bytes);
}
inline void bulk_commit() { simt::bulk_commit(); }
template <int N>
inline void bulk_wait_read(simt::CallSite site = simt::CallSite::here()) {
  const bool is_left_out = detail::Site{"bulk_wait_read", site}.is_left_out();
  if (!is_left_out && !fault(Fault::kSkipBulkWaitRead)) simt::bulk_wait(N, true);
}
template <int N>
inline void bulk_wait(simt::CallSite site = simt::CallSite::here()) {
  const bool is_left_out = detail::Site{"bulk_wait", site}.is_left_out();
  if (!is_left_out && !fault(Fault::kSkipBulkWait)) simt::bulk_wait(N, false);
}

// ---- rail -----------------------------------------------------------------------------

inline void rail_put(const RailPort& port, int peer, int qp, size_t dst_offset, const void* src,
                     uint32_t num_bytes) {
  // One host thread runs all fibers of the grid, so a plain addition is safe.
  if (port.num_bytes != nullptr) port.num_bytes[peer * port.num_qps + qp] += num_bytes;
  simt::rail_put(peer, qp, port.bases[peer] + dst_offset, src, num_bytes);
}
inline void rail_signal(const RailPort& port, int peer, int qp, size_t word_offset,
                        uint64_t value) {
  simt::rail_signal(peer, qp, reinterpret_cast<uint64_t*>(port.bases[peer] + word_offset), value);
}
inline void rail_put_warp(const RailPort& port, int peer, int qp, size_t dst_offset,
                          const void* src, uint32_t num_bytes) {
  if (lane_idx() == 0) rail_put(port, peer, qp, dst_offset, src, num_bytes);
}
inline uint8_t* rail_near(const RailPort& port, int peer) {
  return port.peers == nullptr ? nullptr : port.peers[peer].near;
}
inline void rail_count(const RailPort& port, int peer, int qp, uint64_t num_bytes) {
  port.num_bytes[peer * port.num_qps + qp] += num_bytes;
}
inline void rail_done(const RailPort&) { simt::rail_done(); }

// ---- launches -------------------------------------------------------------------------
// Outside of a simulation a launch begins when the one before it has ended.

inline void await_earlier_launch() {
  if (!fault(Fault::kSkipLaunchWait)) simt::await_earlier_launch();
}
inline void allow_later_launch() { simt::allow_later_launch(); }

// ---- waiting, time --------------------------------------------------------------------

template <class T>
inline void wait_hint(const T* word, T seen, const uint32_t* abort_word, uint64_t deadline_ns) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  simt::wait_word(word, sizeof(T), detail::to_bits(seen), abort_word, deadline_ns);
}
inline void wait_note(const WaitNote& note) {
  simt::Fiber* self = simt::t_state.current;
  self->note = simt::Note{note.kernel, note.stage,   note.word,    note.rank,
                          note.peer,   note.channel, note.expected};
  self->has_note = true;
}
inline uint64_t globaltimer_ns() { return simt::clock_ns(); }
inline void nanosleep(uint32_t duration_ns) { simt::sleep_ns(duration_ns); }
[[noreturn]] inline void trap(const char* why) { simt::trap(why); }

}  // namespace deep_comm::arch
