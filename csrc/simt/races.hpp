// Finds accesses to the shared memory of a block that nothing orders.
//
// Every access belongs to an agent: a thread, or an engine that copies for it (one agent for the
// bulk loads of an mbarrier, one for the bulk stores of a thread). An agent counts its epochs. A
// thread knows by clocks which epochs of the others come before what it does now; barriers,
// mbarriers, releases and waits pass clocks on. Each word of shared memory remembers who has written
// and who has read it: whoever touches it must have that epoch in its clock (Flanagan and Freund,
// "FastTrack", PLDI 2009). So a race is found in whichever order the two accesses run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "view.hpp"

namespace deep_comm::simt {

struct Block;
struct Fiber;

// Whether this module's kernels are compiled so that their plain accesses are seen.
bool finds_races();  // plain_accesses.cpp

// By agent: its epochs up to that one come before. A value; copies share their memory until one of
// them changes.
class Clock {
 public:
  Clock() = default;
  Clock(const Clock& other) : data_(other.data_) {
    if (data_) ++data_->num_refs;
  }
  Clock& operator=(Clock other) {
    std::swap(data_, other.data_);
    return *this;
  }
  ~Clock() {
    if (data_ && --data_->num_refs == 0) give_back(data_);
  }

  uint32_t of(size_t agent) const {
    return data_ && agent < data_->epochs.size() ? data_->epochs[agent] : 0;
  }
  void set(size_t agent, uint32_t epoch);
  void join(const Clock& other);
  // The first agent of whose epochs this clock lacks some, from `agent` on; epochs.size(): none.
  size_t first_missing(const std::vector<uint32_t>& epochs, size_t agent) const;

 private:
  struct Data {
    uint32_t num_refs = 1;
    uint64_t number = 0;  // another one after each change
    std::vector<uint32_t> epochs;
    std::vector<uint64_t> covered;  // numbers of clocks that this one covers; the newest ones
  };

  struct Pool;

  static Data* take();
  static void give_back(Data* data);
  bool covers(const Data& other) const;
  void make_own(size_t num_agents);

  Data* data_ = nullptr;
};

// What those who meet, or hand over, tell the others.
struct Meeting {
  View view;     // of global memory
  Clock seen;    // of the block's shared memory
  Clock fenced;  // that part of it which bulk copies see
};

class Races {
 public:
  explicit Races(const Block& block);

  enum class Access : uint8_t {
    kRead,
    kWrite,
    kStrongRead,  // of words that others may write at the same time; as is an atomic
    kStrongWrite,
  };
  // `code`: of the kernel, for the report.
  void access(const Fiber* self, const void* address, size_t num_bytes, Access access,
              const void* code);

  void arrive(const Fiber* self, Meeting& meeting);
  void leave(const Fiber* self, const Meeting& meeting);    // where it has arrived itself
  void acquire(const Fiber* self, const Meeting& meeting);  // where it need not have

  // Words that are stored and loaded with an order, wherever they are.
  void store_word(const Fiber* self, const void* address, bool releases);
  void load_word(const Fiber* self, const void* address, bool acquires);
  void update_word(const Fiber* self, const void* address, bool is_ordered);
  void fence(const Fiber* self);
  void proxy_fence(const Fiber* self);

  // `agent` of the mbarrier, and its phase under way, which counts from 1.
  void bulk_load(const Fiber* self, const void* dst, size_t num_bytes, size_t agent,
                 uint32_t phase);
  void bulk_store(const Fiber* self, const void* src, size_t num_bytes);
  void bulk_wait(const Fiber* self, uint32_t newest_groups);
  size_t add_agent(std::string name);

 private:
  static constexpr size_t kWordBytes = 4;
  static constexpr size_t kPageWords = 256;
  static constexpr size_t kNone = ~size_t{0};

  struct Thread {
    Clock seen, fenced;
    uint32_t epoch = 1;
    uint32_t fenced_epoch = 0;  // of its own
    size_t store_agent = kNone;
    uint32_t groups_read = 0;  // of its bulk stores
    // Of words that were loaded without an order; and what its last fence makes stores carry.
    std::unique_ptr<Meeting> relaxed, fence;
  };

  struct Word {
    uint32_t write_epoch = 0, read_epoch = 0;  // 0: none
    int32_t write_code = 0, read_code = 0;
    int32_t readers = -1;  // of readers_, if many agents have read it since; -1: one at most
    uint16_t writer = 0, reader = 0;
    uint8_t written = 0, read = 0;  // bit i: byte i
    bool is_strong = false;         // the write
  };
  using Page = std::unique_ptr<Word[]>;

  // How an access comes to be: by a thread itself, or by an engine in its name.
  struct Actor {
    const Fiber* self;
    Thread& thread;
    size_t agent;
    uint32_t epoch;
    bool is_copy;
    int32_t code;
  };
  enum class Order : uint8_t { kNone, kNoProxyFence, kFull };

  Thread& thread_of(const Fiber* self);
  Order order_of(const Actor& actor, size_t agent, uint32_t epoch) const;
  void require_order(const Actor& actor, size_t word, const char* verb, size_t agent,
                     uint32_t epoch, const char* other_verb, int32_t other_code);
  template <class Visit>
  void for_words(const void* address, size_t num_bytes, Visit visit);
  void read(const Actor& actor, size_t index, uint8_t bytes, bool is_strong);
  void write(const Actor& actor, size_t index, uint8_t bytes, bool is_strong);
  void add_reader(Word& word, const Actor& actor, uint8_t bytes);
  std::string name_of(size_t agent) const;

  const Block& block_;
  std::vector<Thread> threads_;
  std::vector<std::string> agents_;  // those that are no threads
  std::vector<Page> pages_;
  std::vector<std::vector<uint32_t>> readers_;  // by agent
  std::vector<int32_t> free_readers_;
  std::unordered_map<const void*, Meeting> words_;
};

}  // namespace deep_comm::simt
