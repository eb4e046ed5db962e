// The rings of traces, as deep_comm.trace reads them; the layout stays in C++.
#include <pybind11/stl.h>

#include <iterator>
#include <string>
#include <tuple>
#include <vector>

#include "bind/bindings.hpp"
#include "device/layout/trace.cuh"

namespace py = pybind11;

namespace deep_comm {

namespace {

// kernel, generation, block, step, time, value
using Event = std::tuple<int, uint32_t, int, int, uint64_t, uint32_t>;

// Of the newest call in a page; what is left of older ones is not whole.
void read_page(const Trace& trace, int kernel, uint32_t call, std::vector<Event>* events) {
  const TraceSlot* page = trace.slot(static_cast<Kernel>(kernel), call, 0, TraceStep{});
  constexpr int kNumSlots = Trace::kMaxBlocks * Trace::kNumSteps;
  const TraceSlot* newest = page;
  for (const TraceSlot* slot = page; slot != page + kNumSlots; ++slot) {
    if (slot->time_ns > newest->time_ns) newest = slot;
  }
  if (newest->generation == 0) return;
  for (int idx = 0; idx < kNumSlots; ++idx) {
    const TraceSlot& slot = page[idx];
    if (slot.generation != newest->generation) continue;
    events->emplace_back(kernel, slot.generation, idx / Trace::kNumSteps, idx % Trace::kNumSteps,
                         slot.time_ns, slot.value);
  }
}

std::vector<Event> read_trace(uintptr_t slots, uint32_t num_calls) {
  const Trace trace{reinterpret_cast<TraceSlot*>(slots), num_calls - 1};
  std::vector<Event> events;
  for (int kernel = 0; kernel < Trace::kNumKernels; ++kernel) {
    for (uint32_t call = 0; call < num_calls; ++call) read_page(trace, kernel, call, &events);
  }
  return events;
}

template <size_t kCount>
py::tuple names_of(const char* const (&names)[kCount]) {
  py::tuple all(kCount);
  for (size_t idx = 0; idx < kCount; ++idx) all[idx] = names[idx];
  return all;
}

}  // namespace

void bind_trace(py::module_& m) {
  using namespace pybind11::literals;
  m.attr("trace_steps") = names_of(kTraceStepNames);
  m.attr("kernel_names") = names_of(kKernelNames);
  m.def("trace_bytes", &Trace::num_bytes, "num_calls"_a);
  m.def("read_trace", &read_trace, "slots"_a, "num_calls"_a);
  m.def(
      "trace_wait",
      [](uint32_t value) {
        const uint32_t stage = value >> 24, word = value >> 16 & 0xff;
        // A file may be damaged.
        if (stage >= std::size(kStageNames) || word >= std::size(kWordNames)) {
          throw py::value_error("no stage " + std::to_string(stage) + " and word " +
                                std::to_string(word));
        }
        return std::tuple(kStageNames[stage], kWordNames[word],
                          static_cast<int>(value & 0xffff) - 1);
      },
      "value"_a);
}

}  // namespace deep_comm
