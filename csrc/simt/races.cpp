#include "races.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>

#include "executor.hpp"
#include "fiber.hpp"
#include "ops.hpp"

namespace deep_comm::simt {
namespace {

constexpr size_t kMaxCovered = 48;

uint64_t next_number() {
  static thread_local uint64_t number = 0;
  return ++number;
}

void raise(std::vector<uint32_t>& epochs, const std::vector<uint32_t>& other) {
  if (epochs.size() < other.size()) epochs.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) epochs[i] = std::max(epochs[i], other[i]);
}

// Places of code are kept as distances from here.
void anchor() {}

int32_t pack_code(const void* code) {
  return code == nullptr ? 0
                         : static_cast<int32_t>(reinterpret_cast<intptr_t>(code) -
                                                reinterpret_cast<intptr_t>(&anchor));
}

// How to find the lines of code.
std::string describe_code(int32_t here, int32_t other) {
  Dl_info module{};
  if ((here == 0 && other == 0) || dladdr(reinterpret_cast<const void*>(&anchor), &module) == 0) {
    return "";
  }
  std::string text = std::string("\n  addr2line -Cfpie ") + module.dli_fname;
  for (const int32_t code : {here, other}) {
    char place[24];
    const intptr_t offset =
        reinterpret_cast<intptr_t>(&anchor) + code - reinterpret_cast<intptr_t>(module.dli_fbase);
    // A return address is behind the call.
    std::snprintf(place, sizeof place, " 0x%llx", static_cast<unsigned long long>(offset - 1));
    if (code != 0) text += place;
  }
  return text;
}

}  // namespace

// ---- clocks ---------------------------------------------------------------------------

bool Clock::covers(const Data& other) const {
  return std::find(data_->covered.rbegin(), data_->covered.rend(), other.number) !=
         data_->covered.rend();
}

// Data that nobody uses, with their memory.
struct Clock::Pool {
  std::vector<Data*> free;

  ~Pool() {
    for (Data* data : free) delete data;
  }
  static Pool& of_thread() {
    static thread_local Pool pool;
    return pool;
  }
};

Clock::Data* Clock::take() {
  std::vector<Data*>& free = Pool::of_thread().free;
  if (free.empty()) return new Data;
  Data* data = free.back();
  free.pop_back();
  data->num_refs = 1;
  return data;
}

void Clock::give_back(Data* data) {
  data->epochs.clear();
  data->covered.clear();
  Pool::of_thread().free.push_back(data);
}

void Clock::make_own(size_t num_agents) {
  if (!data_) {
    data_ = take();
  } else if (data_->num_refs > 1) {
    Data* copy = take();
    copy->epochs = data_->epochs;
    copy->covered = data_->covered;
    copy->covered.push_back(data_->number);
    --data_->num_refs;
    data_ = copy;
  }
  data_->number = next_number();
  if (data_->epochs.size() < num_agents) data_->epochs.resize(num_agents);
}

void Clock::set(size_t agent, uint32_t epoch) {
  if (of(agent) >= epoch) return;
  make_own(agent + 1);
  data_->epochs[agent] = epoch;
}

void Clock::join(const Clock& other) {
  if (!other.data_ || data_ == other.data_) return;
  if (!data_ || other.covers(*data_)) {
    *this = other;
    return;
  }
  if (covers(*other.data_)) return;
  make_own(other.data_->epochs.size());
  raise(data_->epochs, other.data_->epochs);
  std::vector<uint64_t>& covered = data_->covered;
  if (covered.size() >= kMaxCovered) {
    covered.erase(covered.begin(), covered.begin() + kMaxCovered / 2);
  }
  covered.push_back(other.data_->number);
}

size_t Clock::first_missing(const std::vector<uint32_t>& epochs, size_t agent) const {
  while (agent < epochs.size() && epochs[agent] <= of(agent)) ++agent;
  return agent;
}

// ---- threads --------------------------------------------------------------------------

Races::Races(const Block& block)
    : block_(block),
      threads_(static_cast<size_t>(block.grid->grid.num_threads)),
      pages_((block.smem.num_bytes / kWordBytes + kPageWords) / kPageWords) {}

Races::Thread& Races::thread_of(const Fiber* self) {
  return threads_[static_cast<size_t>(self->thread_idx)];
}

size_t Races::add_agent(std::string name) {
  agents_.push_back(std::move(name));
  return threads_.size() + agents_.size() - 1;
}

std::string Races::name_of(size_t agent) const {
  if (agent >= threads_.size()) return agents_[agent - threads_.size()];
  return "warp " + std::to_string(agent / kLanes) + " lane " + std::to_string(agent % kLanes);
}

void Races::arrive(const Fiber* self, Meeting& meeting) {
  Thread& thread = thread_of(self);
  const auto agent = static_cast<size_t>(self->thread_idx);
  meeting.seen.join(thread.seen);
  meeting.seen.set(agent, thread.epoch);
  if (thread.store_agent != kNone) meeting.seen.set(thread.store_agent, thread.groups_read);
  meeting.fenced.join(thread.fenced);
  meeting.fenced.set(agent, thread.fenced_epoch);
  ++thread.epoch;
}

// Its own clocks are part of the meeting's since it has arrived.
void Races::leave(const Fiber* self, const Meeting& meeting) {
  Thread& thread = thread_of(self);
  thread.seen = meeting.seen;
  thread.fenced = meeting.fenced;
}

void Races::acquire(const Fiber* self, const Meeting& meeting) {
  Thread& thread = thread_of(self);
  thread.seen.join(meeting.seen);
  thread.fenced.join(meeting.fenced);
}

void Races::fence(const Fiber* self) {
  Thread& thread = thread_of(self);
  if (thread.relaxed) acquire(self, *thread.relaxed);
  thread.fence = std::make_unique<Meeting>();
  arrive(self, *thread.fence);
}

void Races::proxy_fence(const Fiber* self) {
  Thread& thread = thread_of(self);
  thread.fenced = thread.seen;
  thread.fenced_epoch = thread.epoch++;
}

// ---- words ----------------------------------------------------------------------------

// A thread that reads an older value is taken for one that reads the newest.
void Races::load_word(const Fiber* self, const void* address, bool acquires) {
  const auto found = words_.find(address);
  if (found == words_.end()) return;
  if (acquires) {
    acquire(self, found->second);
    return;
  }
  std::unique_ptr<Meeting>& relaxed = thread_of(self).relaxed;
  if (!relaxed) relaxed = std::make_unique<Meeting>();
  relaxed->seen.join(found->second.seen);
  relaxed->fenced.join(found->second.fenced);
}

void Races::store_word(const Fiber* self, const void* address, bool releases) {
  Thread& thread = thread_of(self);
  words_.erase(address);
  if (releases) {
    arrive(self, words_[address]);
  } else if (thread.fence) {
    words_[address] = *thread.fence;
  }
}

void Races::update_word(const Fiber* self, const void* address, bool is_ordered) {
  load_word(self, address, is_ordered);
  Thread& thread = thread_of(self);
  if (is_ordered) {
    arrive(self, words_[address]);
  } else if (thread.fence) {
    Meeting& meeting = words_[address];
    meeting.seen.join(thread.fence->seen);
    meeting.fenced.join(thread.fence->fenced);
  }
}

// ---- accesses -------------------------------------------------------------------------

Races::Order Races::order_of(const Actor& actor, size_t agent, uint32_t epoch) const {
  const Thread& thread = actor.thread;
  const auto own = static_cast<size_t>(actor.self->thread_idx);
  const bool is_own_copy = agent == thread.store_agent;
  const bool is_seen = agent == own || epoch <= thread.seen.of(agent) ||
                       (is_own_copy && epoch <= thread.groups_read);
  if (!is_seen) return Order::kNone;
  if (!actor.is_copy || agent >= threads_.size()) return Order::kFull;
  const bool is_fenced =
      epoch <= thread.fenced.of(agent) || (agent == own && epoch <= thread.fenced_epoch);
  return is_fenced ? Order::kFull : Order::kNoProxyFence;
}

void Races::require_order(const Actor& actor, size_t word, const char* verb, size_t agent,
                          uint32_t epoch, const char* other_verb, int32_t other_code) {
  const Order order = order_of(actor, agent, epoch);
  if (order == Order::kFull) [[likely]]
    return;
  const std::string what = actor.is_copy ? name_of(actor.agent) + " " : "";
  t_state.executor->fail(
      actor.self, what + verb + " shared memory at offset " + std::to_string(word * kWordBytes) +
                      ", which " + name_of(agent) + " " + other_verb + ", and " +
                      (order == Order::kNone ? "nothing orders the two"
                                             : "no fence_proxy_async_shared stands in between") +
                      describe_code(actor.code, other_code));
}

template <class Visit>
void Races::for_words(const void* address, size_t num_bytes, Visit visit) {
  const auto begin = static_cast<size_t>(static_cast<const uint8_t*>(address) - block_.smem.base);
  const size_t end = std::min(begin + num_bytes, block_.smem.num_bytes);
  for (size_t index = begin / kWordBytes; index * kWordBytes < end; ++index) {
    const size_t first = std::max(begin, index * kWordBytes) - index * kWordBytes;
    const size_t last = std::min(end - index * kWordBytes, kWordBytes);
    Page& page = pages_[index / kPageWords];
    if (!page) page = std::make_unique<Word[]>(kPageWords);
    visit(index, static_cast<uint8_t>((1u << last) - (1u << first)));
  }
}

void Races::add_reader(Word& word, const Actor& actor, uint8_t bytes) {
  if (word.readers < 0) {
    const bool takes_place = word.read_epoch == 0 || word.reader == actor.agent ||
                             order_of(actor, word.reader, word.read_epoch) == Order::kFull;
    if (takes_place) {
      const bool is_same = word.reader == actor.agent && word.read_epoch == actor.epoch;
      word.read = static_cast<uint8_t>(is_same ? word.read | bytes : bytes);
      word.reader = static_cast<uint16_t>(actor.agent);
      word.read_epoch = actor.epoch;
      return;
    }
    if (free_readers_.empty()) {
      free_readers_.push_back(static_cast<int32_t>(readers_.size()));
      readers_.emplace_back();
    }
    word.readers = free_readers_.back();
    free_readers_.pop_back();
    std::vector<uint32_t>& readers = readers_[static_cast<size_t>(word.readers)];
    readers.assign(threads_.size() + agents_.size(), 0);
    readers[word.reader] = word.read_epoch;
  }
  std::vector<uint32_t>& readers = readers_[static_cast<size_t>(word.readers)];
  if (readers.size() <= actor.agent) readers.resize(actor.agent + 1);
  readers[actor.agent] = actor.epoch;
  word.read &= bytes;  // of what not all have read, races are missed
}

void Races::read(const Actor& actor, size_t index, uint8_t bytes, bool is_strong) {
  Word& word = pages_[index / kPageWords][index % kPageWords];
  if ((word.written & bytes) != 0 && !(is_strong && word.is_strong)) {
    require_order(actor, index, "reads", word.writer, word.write_epoch, "has written",
                  word.write_code);
  }
  if (is_strong) return;  // a write that comes too early is found the other way round
  add_reader(word, actor, bytes);
  word.read_code = actor.code;
}

void Races::write(const Actor& actor, size_t index, uint8_t bytes, bool is_strong) {
  Word& word = pages_[index / kPageWords][index % kPageWords];
  // One of several lanes that write by one instruction wins; which one does not matter if all write
  // the same (CUDA C++ Programming Guide, SIMT Architecture). Their values are not compared.
  const bool is_one_instruction = actor.code != 0 && actor.code == word.write_code &&
                                  actor.agent / kLanes == word.writer / kLanes;
  if ((word.written & bytes) != 0 && !is_one_instruction && !(is_strong && word.is_strong)) {
    require_order(actor, index, "writes", word.writer, word.write_epoch, "has written",
                  word.write_code);
  }
  if ((word.read & bytes) != 0) {
    if (word.readers < 0) {
      require_order(actor, index, "writes", word.reader, word.read_epoch, "has read",
                    word.read_code);
    } else {
      const std::vector<uint32_t>& readers = readers_[static_cast<size_t>(word.readers)];
      const Thread& thread = actor.thread;
      const Clock& clock = actor.is_copy ? thread.fenced : thread.seen;
      for (size_t agent = clock.first_missing(readers, 0); agent < readers.size();
           agent = clock.first_missing(readers, agent + 1)) {
        require_order(actor, index, "writes", agent, readers[agent], "has read", word.read_code);
      }
    }
  }
  if ((word.read & ~bytes) == 0) {
    if (word.readers >= 0) free_readers_.push_back(word.readers);
    word.readers = -1;
    word.read_epoch = 0;
    word.read = 0;
  }
  const bool is_same = word.writer == actor.agent && word.write_epoch == actor.epoch;
  word.written = static_cast<uint8_t>(is_same ? word.written | bytes : bytes);
  word.is_strong = is_strong && (!is_same || word.is_strong);
  word.writer = static_cast<uint16_t>(actor.agent);
  word.write_epoch = actor.epoch;
  word.write_code = actor.code;
}

void Races::access(const Fiber* self, const void* address, size_t num_bytes, Access access,
                   const void* code) {
  if (!block_.owns(address)) return;
  Thread& thread = thread_of(self);
  const Actor actor{.self = self,
                    .thread = thread,
                    .agent = static_cast<size_t>(self->thread_idx),
                    .epoch = thread.epoch,
                    .is_copy = false,
                    .code = pack_code(code)};
  const bool is_strong = access == Access::kStrongRead || access == Access::kStrongWrite;
  const bool writes = access == Access::kWrite || access == Access::kStrongWrite;
  for_words(address, num_bytes, [&](size_t index, uint8_t bytes) {
    writes ? write(actor, index, bytes, is_strong) : read(actor, index, bytes, is_strong);
  });
}

// ---- bulk copies ----------------------------------------------------------------------

void Races::bulk_load(const Fiber* self, const void* dst, size_t num_bytes, size_t agent,
                      uint32_t phase) {
  const Actor actor{.self = self,
                    .thread = thread_of(self),
                    .agent = agent,
                    .epoch = phase,
                    .is_copy = true,
                    .code = 0};
  for_words(dst, num_bytes,
            [&](size_t index, uint8_t bytes) { write(actor, index, bytes, false); });
}

void Races::bulk_store(const Fiber* self, const void* src, size_t num_bytes) {
  Thread& thread = thread_of(self);
  if (thread.store_agent == kNone) {
    thread.store_agent =
        add_agent("a bulk_store of " + name_of(static_cast<size_t>(self->thread_idx)));
  }
  const Actor actor{.self = self,
                    .thread = thread,
                    .agent = thread.store_agent,
                    .epoch = self->num_committed_groups + 1,
                    .is_copy = true,
                    .code = 0};
  for_words(src, num_bytes, [&](size_t index, uint8_t bytes) { read(actor, index, bytes, false); });
}

void Races::bulk_wait(const Fiber* self, uint32_t newest_groups) {
  Thread& thread = thread_of(self);
  if (self->num_committed_groups > newest_groups) {
    thread.groups_read = std::max(thread.groups_read, self->num_committed_groups - newest_groups);
  }
}

}  // namespace deep_comm::simt
