// What blocks note while they run: the trace rings of one rank, in its own device memory. See
// sync/trace.cuh and docs/design/0042.
//
//   rings = TraceSlot [kNumKernels][num_calls][kMaxBlocks][kNumSteps]
//
// A step has a slot of its own in a call's page. Calls follow each other round the ring by their
// generation. So a note is one store: nothing is read, counted or agreed on before.
#pragma once

#include "device/layout/names.cuh"

#ifndef DEEP_COMM_TRACE_LOW_LATENCY
#define DEEP_COMM_TRACE_LOW_LATENCY 0
#endif

namespace deep_comm {

// In the order in which a block passes them, as far as there is one.
enum class TraceStep : uint32_t {
  kBegun,      // the block runs and knows its call: a dispatch behind a notify, when that has ended
  kCounted,    // notify: it has counted its tokens; low latency: it has sent the rank's counts
  kEntered,    // all peers have arrived; value: the mode, if there are several
  kForwarded,  // two tiers: it has forwarded its last row from or to another node, and the metadata
  kSent,       // it has sent its last row
  kReceived,   // its last row has arrived
  kLeft,       // everything is done
  kGaveUp,     // a wait has failed; value: TraceWait
  kCount
};

inline constexpr const char* kTraceStepNames[] = {"begun", "counted",  "entered", "forwarded",
                                                  "sent",  "received", "left",    "gave_up"};
static_assert(sizeof(kTraceStepNames) / sizeof(char*) == static_cast<size_t>(TraceStep::kCount));

// One note. Written by one store, so a reader finds a complete one, of this call or an earlier one.
struct alignas(16) TraceSlot {
  uint64_t time_ns;
  uint32_t generation;  // of the call; 0: not written yet
  uint32_t value;
};

// The value of kGaveUp.
struct TraceWait {
  DC_HOST_DEVICE static uint32_t pack(Stage stage, Word word, int peer) {
    return static_cast<uint32_t>(stage) << 24 | static_cast<uint32_t>(word) << 16 |
           static_cast<uint32_t>(peer + 1);
  }
};

// The rings of a rank; in every kernel's arguments.
struct Trace {
  // Kernels that talk to peers: their calls are numbered.
  static constexpr int kNumKernels = 10;
  static constexpr int kMaxBlocks = 256;
  static constexpr int kNumSteps = 16;
  static_assert(kNumSteps >= static_cast<int>(TraceStep::kCount));
  static_assert(kNumKernels > static_cast<int>(Kernel::kInternodeCombine));

  TraceSlot* slots;    // null: off
  uint32_t last_call;  // calls per ring, a power of two, minus one

  // On GPUs the test whether tracing is on costs a low-latency kernel 0.2 µs or more. So a build
  // must ask for it.
  static constexpr bool kInLowLatency = !DEEP_COMM_TARGET_CUDA || DEEP_COMM_TRACE_LOW_LATENCY;

  DC_HOST_DEVICE static constexpr bool is_noted(Kernel kernel) {
    const bool is_low_latency =
        kernel == Kernel::kLowLatencyDispatch || kernel == Kernel::kLowLatencyCombine;
    return static_cast<int>(kernel) < kNumKernels && (kInLowLatency || !is_low_latency);
  }

  static size_t num_bytes(size_t num_calls) {
    return sizeof(TraceSlot) * kNumKernels * num_calls * kMaxBlocks * kNumSteps;
  }
  DC_HOST_DEVICE TraceSlot* slot(Kernel kernel, uint32_t generation, int block,
                                 TraceStep step) const {
    const uint32_t page =
        static_cast<uint32_t>(kernel) * (last_call + 1) + (generation & last_call);
    return slots + (static_cast<size_t>(page) * kMaxBlocks + block) * kNumSteps +
           static_cast<uint32_t>(step);
  }
};

}  // namespace deep_comm
