// Who waits for what: for errors and for runs that are stuck.
#include "executor.hpp"
#include "ops.hpp"

namespace deep_comm::simt {
namespace {

std::string lanes_text(uint32_t lanes) {
  std::string text;
  for (int first = 0; first < kLanes; ++first) {
    if (!(lanes >> first & 1)) continue;
    int last = first;
    while (last + 1 < kLanes && (lanes >> (last + 1) & 1)) ++last;
    if (!text.empty()) text += ",";
    text += std::to_string(first);
    if (last > first) text += "-" + std::to_string(last);
    first = last;
  }
  return (text.find_first_of(",-") == std::string::npos ? "lane " : "lanes ") + text;
}

std::string barrier_progress(const NamedBarrier& state, int expected) {
  return " (" + std::to_string(state.arrived) + " of " + std::to_string(expected) +
         " threads are there)";
}

std::string describe_collective(const Fiber* fiber) {
  const Warp& warp = *fiber->warp;
  for (int i = 0; i < warp.num_pending; ++i) {
    const PendingCollective& pending = warp.pending[i];
    if (!(pending.arrived >> fiber->lane & 1)) continue;
    return std::string("at ") + name_of(pending.op) + ", waits for " +
           lanes_text(pending.mask & ~pending.arrived);
  }
  return "at a warp collective";
}

std::string describe_word(const Fiber* fiber, uint64_t seen_now) {
  std::string text = "waits";
  if (fiber->has_note) {
    const Note& note = fiber->note;
    text = std::string("stage=") + note.stage + " word=" + note.word +
           " peer=" + std::to_string(note.peer) + " channel=" + std::to_string(note.channel) +
           " expected=" + std::to_string(note.expected);
  } else {
    text += " for a word to change";
  }
  return text + " seen=" + std::to_string(seen_now);
}

}  // namespace

std::string location_of(const Fiber* fiber) {
  const GridRun* run = grid_of(fiber);
  return std::string("kernel '") + run->grid.kernel + "' rank " + std::to_string(run->grid.rank) +
         " block " + std::to_string(block_of(fiber)->index) + " warp " +
         std::to_string(fiber->warp->index) + " lane " + std::to_string(fiber->lane);
}

std::string describe_wait(const Fiber* fiber, uint64_t seen_now) {
  const Block& block = *block_of(fiber);
  switch (fiber->wait) {
    case Wait::kNone:
      return "ready to run";
    case Wait::kExited:
      return "has exited";
    case Wait::kSleep:
      return "sleeps";
    case Wait::kEarlierLaunch:
      return "waits for the end of the launch before";
    case Wait::kCollective:
      return describe_collective(fiber);
    case Wait::kBlockBarrier:
      return "at sync_block" + barrier_progress(block.barriers[0], block.num_live);
    case Wait::kNamedBarrier: {
      const NamedBarrier& state = block.barriers[fiber->barrier];
      return "at sync_named(" + std::to_string(fiber->barrier) + ")" +
             barrier_progress(state, state.expected);
    }
    case Wait::kMbarrier: {
      const auto offset = static_cast<const uint8_t*>(fiber->word) - block.smem.base;
      return "waits for parity " + std::to_string(fiber->seen) + " of the mbarrier at byte " +
             std::to_string(offset) + " of shared memory";
    }
    case Wait::kWord:
      return describe_word(fiber, seen_now);
  }
  return "?";
}

// One line for all lanes of a warp that wait for the same.
std::string Executor::describe(const GridRun& run) {
  std::string text;
  for (int w = 0; run.warps && w < run.num_warps(); ++w) {
    const Warp& warp = run.warps[w];
    std::string what[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      const Fiber* fiber = warp.lanes[lane];
      if (!fiber || fiber->wait == Wait::kExited) continue;
      const uint64_t seen_now =
          fiber->wait == Wait::kWord ? peek(fiber, fiber->word, fiber->word_bytes) : 0;
      what[lane] = describe_wait(fiber, seen_now);
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      if (what[lane].empty()) continue;
      uint32_t same = 0;
      const std::string line = what[lane];
      for (int other = lane; other < kLanes; ++other) {
        if (what[other] != line) continue;
        same |= 1u << other;
        what[other].clear();
      }
      text += std::string("  kernel '") + run.grid.kernel + "' rank " +
              std::to_string(run.grid.rank) + " block " + std::to_string(warp.block->index) +
              " warp " + std::to_string(warp.index) + " " + lanes_text(same) + ": " + line + "\n";
    }
  }
  return text;
}

}  // namespace deep_comm::simt
