// The simulated machine as the primitives of this folder see it: faults, and the places of a kernel
// that a simulation may weaken. Nothing else in device/ includes csrc/simt/.
#pragma once

#include "../../simt/faults.hpp"
#include "../../simt/ops.hpp"
#include "arch.cuh"

namespace deep_comm::arch {

// ---- faults ---------------------------------------------------------------------------
static_assert(simt::kFaultNames[0].bit == static_cast<uint32_t>(Fault::kWeakenRelease));
static_assert(simt::kFaultNames[1].bit == static_cast<uint32_t>(Fault::kWeakenFence));
static_assert(simt::kFaultNames[2].bit == static_cast<uint32_t>(Fault::kSkipCredit));
static_assert(simt::kFaultNames[3].bit == static_cast<uint32_t>(Fault::kSkipBulkWait));
static_assert(simt::kFaultNames[4].bit == static_cast<uint32_t>(Fault::kSkipBulkWaitRead));
static_assert(simt::kFaultNames[5].bit == static_cast<uint32_t>(Fault::kSkipEntryBarrier));
static_assert(simt::kFaultNames[6].bit == static_cast<uint32_t>(Fault::kSkipArrival));
static_assert(simt::kFaultNames[7].bit == static_cast<uint32_t>(Fault::kSkipClear));
static_assert(simt::kFaultNames[8].bit == static_cast<uint32_t>(Fault::kReorderRail));
static_assert(simt::kFaultNames[9].bit == static_cast<uint32_t>(Fault::kSkipRailCredit));
static_assert(simt::kFaultNames[10].bit == static_cast<uint32_t>(Fault::kEarlyRailCredit));
static_assert(simt::kFaultNames[11].bit == static_cast<uint32_t>(Fault::kSkipRailFence));
static_assert(simt::kFaultNames[12].bit == static_cast<uint32_t>(Fault::kPlainWords));
static_assert(simt::kFaultNames[13].bit == static_cast<uint32_t>(Fault::kSkipLaunchWait));
static_assert(simt::kFaultNames[14].bit == static_cast<uint32_t>(Fault::kSkipVote));
static_assert(simt::kFaultNames[15].bit == static_cast<uint32_t>(Fault::kSkipAgreement));
static_assert(simt::kFaultNames[16].bit == static_cast<uint32_t>(Fault::kSharedRows));
static_assert(simt::kFaultNames[17].bit == static_cast<uint32_t>(Fault::kSkipAlive));
static_assert(simt::kFaultNames[18].bit == static_cast<uint32_t>(Fault::kPackedSources));
static_assert(simt::kFaultNames[19].bit == static_cast<uint32_t>(Fault::kEarlyRailDone));
static_assert(simt::kFaultNames[20].bit == static_cast<uint32_t>(Fault::kAwaitAbsent));
static_assert(simt::kFaultNames[21].bit == static_cast<uint32_t>(Fault::kIgnoreGeneration));
static_assert(simt::kFaultNames[22].bit == static_cast<uint32_t>(Fault::kEarlyGeneration));
static_assert(simt::kFaultNames[23].bit == static_cast<uint32_t>(Fault::kSkipExitBarrier));
static_assert(simt::kFaultNames[24].bit == static_cast<uint32_t>(Fault::kEarlyCredit));
static_assert(simt::kFaultNames[25].bit == static_cast<uint32_t>(Fault::kKeepProposal));
static_assert(simt::kFaultNames[26].bit == static_cast<uint32_t>(Fault::kSkipBlame));
static_assert(simt::kFaultNames[27].bit == static_cast<uint32_t>(Fault::kSkipSums));
static_assert(simt::kFaultNames[28].bit == static_cast<uint32_t>(Fault::kEarlySums));
static_assert(simt::kFaultNames[29].bit == static_cast<uint32_t>(Fault::kLostSums));
static_assert(simt::kFaultNames[30].bit == static_cast<uint32_t>(Fault::kEarlyLanded));
static_assert(simt::kFaultNames[31].bit == static_cast<uint32_t>(Fault::kReverseSums));

inline bool fault(Fault which) {
  return (simt::t_state.faults & static_cast<uint32_t>(which)) != 0;
}

namespace detail {

using simt::AtomicOrder;
using simt::Scope;

inline bool simulated() { return simt::t_state.simulated != nullptr; }

// An operation that orders something, and where in a kernel it stands: a simulation may weaken it.
struct Site {
  const char* op;
  simt::CallSite at;

  simt::Weakening weakening() const {
    simt::Sites* sites = simt::t_state.sites;
    return sites == nullptr ? simt::Weakening::kNone : sites->visit(op, at);
  }
  // True if the whole operation is left out.
  bool is_left_out() const { return weakening() == simt::Weakening::kRelaxed; }
  // Which order is left, and of which scope.
  template <class Order>
  Order weakened(Order strong, Order relaxed, Scope* scope) const {
    switch (weakening()) {
      case simt::Weakening::kRelaxed:
        return relaxed;
      case simt::Weakening::kNarrow:
        if (*scope != Scope::kCta) *scope = static_cast<Scope>(static_cast<int>(*scope) - 1);
        return strong;
      case simt::Weakening::kNone:
        break;
    }
    return strong;
  }
};

}  // namespace detail

}  // namespace deep_comm::arch
