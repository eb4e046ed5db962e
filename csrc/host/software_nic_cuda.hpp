// A NIC in software, for GPU hosts without one: kernels post descriptors to a ring in pinned
// memory, and a thread of the rank's process carries them out with the copy engines. See
// arch::rail_put for what it promises.
//
// Every queue (peer, qp) belongs to one CUDA stream, on which it stays in order; streams run as
// they like. A call into CUDA costs about as much as the copy of a row, so what waits in a queue is
// put together first (rail_backlog.hpp).
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "device/arch/types.cuh"
#include "host/rail_backlog.hpp"

namespace deep_comm {

class SoftwareNic {
 public:
  // peer_bases: [num_peers], as this process addresses them. num_bytes: [num_peers, num_qps],
  // counted here. bytes_per_s: of all queues together; 0: no limit.
  SoftwareNic(int device, std::vector<uint8_t*> peer_bases, int num_qps, uint64_t* num_bytes,
              uint64_t timeout_ns, double bytes_per_s);
  ~SoftwareNic();
  SoftwareNic(const SoftwareNic&) = delete;
  SoftwareNic& operator=(const SoftwareNic&) = delete;

  RailQueue queue() const { return queue_; }
  // Behind every launch of a kernel that posts: returns when the work of `stream`, a cudaStream_t,
  // has ended, at once if it is being captured. A caller who went on could enter a call that waits
  // for the stream while it locks the context, as copies to pageable memory do; the calls of this
  // NIC, which the kernel needs, would then wait for that one. Whoever replays a graph polls the
  // stream likewise. Throws if a copy has failed.
  void see_through(void* stream);
  // While no kernel runs: everything posted has landed. Throws after timeout_ns, or if a copy
  // failed.
  void quiet();

 private:
  void run();
  // Takes the next descriptor; false: there is none yet.
  bool take(uint64_t now_ns);
  // Signals are issued by flush, those of one stream together.
  void issue(const NicOp& op, int queue_idx);
  void flush();
  // On a cudaStream_t, behind what is there.
  void write_value(void* stream, void* word, uint64_t value) const;

  static constexpr uint32_t kDepth = 1 << 14;
  static constexpr int kMaxStreams = 16;

  int device_;
  std::vector<uint8_t*> peer_bases_;
  int num_qps_;
  uint64_t* num_bytes_;
  RailQueue queue_{};
  uint64_t* num_taken_ = nullptr;
  uint64_t* num_ended_ = nullptr;  // launches seen through, told by their streams; pinned
  uint64_t num_launches_ = 0;
  RailBacklog backlog_;
  std::vector<void*> streams_;   // cudaStream_t
  void* write_value_ = nullptr;  // cuStreamWriteValue64
  void* write_batch_ = nullptr;  // cuStreamBatchMemOp; null: not there
  std::vector<NicOp> signals_;   // visited and not issued yet, all of one stream
  void* signals_stream_ = nullptr;
  uint64_t next_ticket_ = 0;
  std::atomic<uint64_t> num_issued_{0};  // descriptors that are on their streams
  std::atomic<bool> is_stopping_{false};
  std::atomic<bool> has_failed_{false};
  std::string failure_;  // written before has_failed_
  std::thread thread_;
};

}  // namespace deep_comm
