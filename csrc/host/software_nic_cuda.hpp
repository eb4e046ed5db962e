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
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "device/arch/types.cuh"
#include "host/rail_backlog.hpp"
#include "host/rail_kernels.hpp"

namespace deep_comm {

class SoftwareNic {
 public:
  // peer_bases: [num_peers], as this process addresses them. num_bytes: [num_peers, num_qps],
  // counted here.
  SoftwareNic(int device, std::vector<uint8_t*> peer_bases, int num_qps, uint64_t* num_bytes,
              uint64_t timeout_ns, const RailOptions& options);
  // While no kernel runs. What they have posted is carried out first; waits for it for timeout_ns.
  ~SoftwareNic();
  SoftwareNic(const SoftwareNic&) = delete;
  SoftwareNic& operator=(const SoftwareNic&) = delete;

  RailQueue queue() const { return queue_; }
  // Of a kernel that posts, before its launch: counts from 1.
  uint64_t next_launch() { return ++num_launches_; }
  // Behind the launch: returns when the work of `stream`, a cudaStream_t, needs this NIC no more: it
  // has ended, or all that it will ever post (rail_done) is on its way. At once if the stream is
  // being captured. A caller who went on earlier could enter a call that waits for the stream while
  // it locks the context, as copies to pageable memory do; the calls of this NIC, which the kernel
  // needs, would then wait for that one. Whoever replays a graph polls the stream likewise. Throws
  // if a copy has failed, or Interrupted.
  void see_through(void* stream, uint64_t launch);
  // While no kernel runs: everything posted has landed. Throws after timeout_ns, or if a copy
  // failed.
  void quiet();

 private:
  void run();
  // Takes the next descriptor; false: there is none yet.
  bool take(uint64_t now_ns);
  // Signals and waits are issued by flush, those of one stream together.
  void issue(const NicOp& op, int queue_idx);
  size_t stream_idx_of(int queue_idx) const;
  // Waits until so many descriptors are on their streams; false: not within timeout_ns, or this NIC
  // is not sound.
  bool has_issued(uint64_t num_posted) const;
  bool is_sound() const;
  // Throws if a copy has failed, or kernels have dropped requests. Nothing mends either.
  void check_sound() const;
  void flush();
  // What waits for times up to `now` goes on.
  void tick(uint64_t now);
  // On a cudaStream_t, behind what is there.
  void write_value(void* stream, void* word, uint64_t value) const;

  static constexpr uint32_t kDepth = 1 << 14;
  static constexpr int kMaxStreams = 16;
  // With a speed puts leave one after the other anyway; in one stream no more than a wait, a copy and
  // a word are needed for each. Credits do not stand behind puts that wait for their time.
  static constexpr int kPutStreams = 1;
  static constexpr int kWordStreams = 2;
  static constexpr uint64_t kNever = ~0ull >> 1;
  // With a speed: operations are issued so long before they may happen, and wait in their streams.
  // More than what a host needs from one call to its next launch.
  static constexpr uint64_t kAheadNs = 300'000;

  struct WordOp {
    void* word;
    uint64_t value;
    bool is_wait;  // until the word is at least that, instead of writing it
  };

  struct FreeOnHost {
    void operator()(void* memory) const;
  };
  struct FreeOnDevice {
    void operator()(void* memory) const;
  };
  struct DestroyStream {
    void operator()(void* stream) const;  // a cudaStream_t
  };
  using Stream = std::unique_ptr<void, DestroyStream>;

  int device_;
  std::vector<uint8_t*> peer_bases_;
  int num_qps_;
  uint64_t* num_bytes_;
  // Each is freed by itself: a constructor that throws half way leaves nothing behind.
  std::unique_ptr<void, FreeOnHost> slots_, host_words_;
  std::unique_ptr<void, FreeOnDevice> device_words_;
  RailQueue queue_{};
  uint64_t* num_taken_ = nullptr;
  uint64_t* num_ended_ = nullptr;  // launches, told by their streams; pinned
  uint64_t num_launches_ = 0;
  uint64_t* clock_ = nullptr;  // now, as streams see it; pinned
  uint64_t last_at_ = 0;       // the last time that a stream waits for
  RailBacklog backlog_;
  bool is_paced_;
  bool is_alone_;
  std::vector<Stream> streams_;
  std::vector<uint64_t> waited_ns_;  // the last time that each waits for
  void* write_value_ = nullptr;      // cuStreamWriteValue64
  void* write_batch_ = nullptr;      // cuStreamBatchMemOp; null: not there
  std::vector<WordOp> words_;        // visited and not issued yet, all of one stream
  void* words_stream_ = nullptr;
  uint64_t next_ticket_ = 0;
  uint64_t last_done_ = 0;               // launch that has told that it posts no more
  std::atomic<uint64_t> num_issued_{0};  // descriptors that are on their streams
  std::atomic<uint64_t> num_done_{0};    // launches all of whose descriptors are
  std::atomic<bool> is_stopping_{false};
  std::atomic<bool> has_failed_{false};
  std::string failure_;  // written before has_failed_
  std::thread thread_;
};

}  // namespace deep_comm
