// Waiting, time, traps and the network, for both machines.
#include "ops.hpp"

#include "executor.hpp"
#include "simulated_executor.hpp"

namespace deep_comm::simt {

void wait_word(const void* word, unsigned num_bytes, uint64_t seen, const uint32_t* abort_word,
               uint64_t deadline_ns) {
  Fiber* self = t_state.current;
  Executor* executor = t_state.executor;
  self->wait = Wait::kWord;
  self->word = word;
  self->word_bytes = static_cast<uint8_t>(num_bytes);
  self->seen = seen;
  self->abort_word = abort_word;
  self->deadline_ns = deadline_ns;
  if (executor->holds(self) || executor->now_ns() >= deadline_ns) {
    self->wait = Wait::kNone;
    executor->yield(self);  // a loop that does not look at what ended the wait must not stop others
    return;
  }
  executor->park(self);
}

namespace {

void require_may_post(Fiber* self) {
  if (block_of(self)->posts_no_more)
    t_state.executor->fail(self, "posts on the rail behind rail_done");
}

}  // namespace

void rail_done() {
  require_may_post(t_state.current);
  block_of(t_state.current)->posts_no_more = true;
}

void rail_put(int peer, int qp, void* dst, const void* src, uint32_t num_bytes) {
  if (num_bytes == 0) t_state.executor->fail(t_state.current, "rail_put of no bytes");
  require_may_post(t_state.current);
  t_state.executor->post_rail({.rank = grid_of(t_state.current)->grid.rank,
                               .peer = peer,
                               .qp = qp,
                               .dst = static_cast<uint8_t*>(dst),
                               .src = static_cast<const uint8_t*>(src),
                               .num_bytes = num_bytes,
                               .value = 0});
}

void rail_signal(int peer, int qp, uint64_t* word, uint64_t value) {
  require_may_post(t_state.current);
  t_state.executor->post_rail({.rank = grid_of(t_state.current)->grid.rank,
                               .peer = peer,
                               .qp = qp,
                               .dst = reinterpret_cast<uint8_t*>(word),
                               .src = nullptr,
                               .num_bytes = 0,
                               .value = value});
}

uint64_t clock_ns() { return t_state.executor->now_ns(); }

void sleep_ns(uint32_t duration_ns) {
  Fiber* self = t_state.current;
  Executor* executor = t_state.executor;
  self->wait = Wait::kSleep;
  self->deadline_ns = executor->now_ns() + duration_ns;
  self->word = nullptr;
  self->abort_word = nullptr;
  executor->park(self);
}

void trap(const char* why) { t_state.executor->fail(t_state.current, std::string("trap: ") + why); }

void poll_yield() {
  t_state.polls_left = kPollsPerYield;
  t_state.executor->yield(t_state.current);
}

}  // namespace deep_comm::simt
