// Plain types and macros that both targets share. It has no instructions of either target.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define DEEP_COMM_TARGET_CUDA 1
#define DC_DEVICE __device__ __forceinline__
// For code that hardly ever runs: a call, so that the code around it stays small. Every launch
// fetches its instructions anew.
#define DC_DEVICE_COLD static __device__ __noinline__
#define DC_HOST_DEVICE __host__ __device__ __forceinline__
#define DC_UNROLL _Pragma("unroll")
#define DC_NO_UNROLL _Pragma("unroll 1")
#define DC_PRAGMA(TEXT) _Pragma(#TEXT)
#define DC_UNROLL_BY(COUNT) DC_PRAGMA(unroll COUNT)
#else
#define DEEP_COMM_TARGET_CUDA 0
#define DC_DEVICE inline
#define DC_DEVICE_COLD inline
#define DC_HOST_DEVICE inline
#define DC_UNROLL
#define DC_NO_UNROLL
#define DC_UNROLL_BY(COUNT)
#endif

namespace deep_comm {

inline constexpr int kWarpSize = 32;
inline constexpr uint32_t kFullMask = 0xffffffffu;

// The unit of every vector access: 16 bytes, the widest load or store of one thread.
struct alignas(16) Vec16 {
  uint32_t words[4];
};

// Half-precision payload is moved and converted by bits, so the protocols need no vendor header.
struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

// One place of all ranks' segments at once: an NVLink switch adds what lies there, or stores to each.
struct Multicast {
  uint8_t* window;        // GPUs: the address that stands for the start of every segment
  uint8_t* const* bases;  // host target: [num_ranks], the segments
  int num_ranks;
  uint64_t offset;  // from the start of each
};

inline constexpr int kRailDone = -1;

// What a GPU asks of its rank's software NIC.
struct RailRequest {
  // a put: address in this rank's segment; a signal: its value; kRailDone: the launch
  uint64_t what;
  uint64_t dst_offset;
  uint32_t num_bytes;  // 0: a signal
  int32_t peer;        // kRailDone: launch `what` posts nothing more
  int32_t qp;
};
// The same in pinned host memory. Every half is stored together with its ticket's number, so no
// half needs a release after the others. A release takes many microseconds on a busy GPU, and later
// tickets would wait for it.
struct alignas(64) RailDescriptor {
  static constexpr int kNumHalves = 7;

  // halves of a RailRequest's fields, in order, each with number << 32
  uint64_t halves[kNumHalves];

  DC_HOST_DEVICE static uint32_t number_of(uint64_t ticket) {
    return static_cast<uint32_t>(ticket + 1);
  }
};
struct RailQueue {
  RailDescriptor* slots;      // [depth], a ring
  uint64_t* num_posted;       // device memory: tickets given out
  uint32_t* num_done;         // device memory: blocks of this kernel that have called rail_done
  const uint64_t* num_taken;  // host memory: descriptors that the NIC has read
  uint64_t timeout_ns;        // for a free slot
  uint32_t* has_given_up;     // host memory: a request has been dropped, since none came free
  uint64_t launch;            // the number of this kernel's launch
  uint32_t depth;
};

// A peer as NVSHMEM knows it; on the host target only near peers.
struct RailPeer {
  uint8_t* near;  // its segment if this GPU's stores reach it (nvshmem_ptr), else null
  int32_t pe;
};

// How a rank reaches its rail, the network between nodes. The first peers are nodes: the rank of
// the same local index there. With low-latency mode all ranks of the group follow, by rank.
struct RailPort {
  // [num_peers]: their segments, as the one that carries out a put sees them
  uint8_t* const* bases;
  uint64_t* num_bytes;  // [num_peers, num_qps]: bytes put so far
  int num_qps;
  RailQueue queue;  // GPUs with a software NIC
  // GPUs with NVSHMEM, and near peers on the host target; null otherwise.
  const RailPeer* peers;  // [num_peers], device memory
  uint8_t* base;          // this rank's segment, in the symmetric heap
  int32_t* qps;           // [num_qps] handles, device memory; null: NVSHMEM's default queue
};

template <class To, class From>
DC_HOST_DEVICE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

template <class T>
DC_HOST_DEVICE constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}
template <class T>
DC_HOST_DEVICE constexpr T align_up(T a, T b) {
  return ceil_div(a, b) * b;
}
template <class T>
DC_HOST_DEVICE constexpr T min_of(T a, T b) {
  return a < b ? a : b;
}
template <class T>
DC_HOST_DEVICE constexpr T max_of(T a, T b) {
  return a > b ? a : b;
}

}  // namespace deep_comm
