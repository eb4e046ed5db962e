// When a launch may hold SMs before the one before it in its stream has ended. Three kinds do so:
// low-latency launches; expand_rows, beside its dispatch; combine of an expanded output, beside
// combine_sums.
//
// Such a launch holds its SMs while it waits, so that one Buffer has two kernels on the device. With
// one Buffer that does so no rank can be kept from its part of an operation: what waits for SMs is
// the launch behind the one that runs, and other kernels run when this Buffer's have ended. With two
// of them, on two streams, one rank may have the first Buffer's operation and the launch behind it
// on its SMs, another rank the second one's; each operation then waits for SMs on the other rank,
// which its own end would free, although one operation of each would fit (docs/design/0010).
//
// A dispatch that begins at the end of its notify is not counted. It takes the SMs that the blocks of
// notify have left. The last of these blocks waits for the peers on one SM more, and what it waits
// for needs no SM that the call itself does not have on every rank. So a call with new routing takes
// part in such a circle only where the SMs of the Buffers fit without that one and not with it.
#pragma once

#include <atomic>
#include <map>
#include <mutex>

namespace deep_comm {

// Buffers of this process whose launches on one device could begin early.
class EarlyLaunches {
 public:
  EarlyLaunches() = default;
  ~EarlyLaunches() { leave(); }
  EarlyLaunches(const EarlyLaunches&) = delete;
  EarlyLaunches& operator=(const EarlyLaunches&) = delete;

  // Again: nothing.
  void join(int device) {
    if (count_ != nullptr) return;
    static std::mutex mutex;
    static std::map<int, std::atomic<int>> counts;  // their addresses stay
    const std::lock_guard<std::mutex> lock(mutex);
    count_ = &counts[device];
    count_->fetch_add(1, std::memory_order_relaxed);
  }
  void leave() {
    if (count_ != nullptr) count_->fetch_sub(1, std::memory_order_relaxed);
    count_ = nullptr;
  }
  // Graphs keep what was true when they were captured: of two Buffers, the one that came second has
  // none that begin early.
  bool are_safe() const {
    return count_ != nullptr && count_->load(std::memory_order_relaxed) == 1;
  }

 private:
  std::atomic<int>* count_ = nullptr;
};

}  // namespace deep_comm
