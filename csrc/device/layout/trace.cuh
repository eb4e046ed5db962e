// What blocks note while they run, and where: the rings of one rank, in its own device memory. See
// sync/trace.cuh and docs/design/0042.
//
//   rings = TraceSlot [kNumKernels][num_calls][kMaxBlocks][kNumSteps]
//
// A step has a slot of its own in a call's page, and calls follow each other round the ring by their
// generation: so a note is one store, with nothing read, counted or agreed on before.
#pragma once

#include "device/layout/names.cuh"

#ifndef DEEP_COMM_TRACE_LOW_LATENCY
#define DEEP_COMM_TRACE_LOW_LATENCY 0
#endif

namespace deep_comm {

// In the order in which a block passes them, as far as there is one.
enum class TraceStep : uint32_t {
  kBegun,      // the block runs and knows its call
  kCounted,    // notify: it has counted its tokens; low latency: it has sent the rank's counts
  kEntered,    // all peers have come; value: the mode, if there are several
  kForwarded,  // two tiers: the last row from another node has been handed on
  kSent,       // its last row has left
  kReceived,   // its last row is there
  kLeft,       // all is done
  kGaveUp,     // a wait ended in vain; value: TraceWait
  kCount
};

inline constexpr const char* kTraceStepNames[] = {"begun", "counted",  "entered", "forwarded",
                                                  "sent",  "received", "left",    "gave_up"};
static_assert(sizeof(kTraceStepNames) / sizeof(char*) == static_cast<size_t>(TraceStep::kCount));

// One note. Written at once, so that a reader finds a whole one, of this call or of one before.
struct alignas(16) TraceSlot {
  uint64_t time_ns;
  uint32_t generation;  // of the call; 0: nobody has written
  uint32_t value;
};

// The value of kGaveUp.
struct TraceWait {
  DC_HOST_DEVICE static uint32_t pack(Stage stage, Word word, int peer) {
    return static_cast<uint32_t>(stage) << 24 | static_cast<uint32_t>(word) << 16 |
           static_cast<uint32_t>(peer + 1);
  }
};

// The rings of a rank; travels in every kernel's arguments.
struct Trace {
  // Kernels that talk to peers, whose calls are numbered.
  static constexpr int kNumKernels = 10;
  static constexpr int kMaxBlocks = 256;
  static constexpr int kNumSteps = 16;
  static_assert(kNumSteps >= static_cast<int>(TraceStep::kCount));
  static_assert(kNumKernels > static_cast<int>(Kernel::kInternodeCombine));

  TraceSlot* slots;    // null: off
  uint32_t last_call;  // of those in a ring: their number, a power of two, less one

  // On GPUs looking whether tracing is on takes a low-latency kernel 0.2 µs and more: a build has to
  // ask for it.
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
