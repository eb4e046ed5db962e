// Engine's Python face, the same for both targets. Pointers travel as integers; 0 stands for "not
// given".
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>

#include "bind/bind_internode.hpp"
#include "bind/bind_low_latency.hpp"
#include "bind/bindings.hpp"
#include "bind/doors.hpp"
#include "bind/interpreter.hpp"
#include "bind/interrupts.hpp"
#include "host/engine.hpp"

namespace deep_comm {

inline void bind_records(pybind11::module_& m) {
  namespace py = pybind11;
  py::class_<ErrorRecord>(m, "ErrorRecord", py::module_local())
      .def_readonly("kind", &ErrorRecord::kind)
      .def_readonly("kernel", &ErrorRecord::kernel)
      .def_readonly("stage", &ErrorRecord::stage)
      .def_readonly("word", &ErrorRecord::word)
      .def_readonly("rank", &ErrorRecord::rank)
      .def_readonly("peer", &ErrorRecord::peer)
      .def_readonly("channel", &ErrorRecord::channel)
      .def_readonly("seen", &ErrorRecord::seen)
      .def_readonly("expected", &ErrorRecord::expected)
      .def_readonly("waited_ns", &ErrorRecord::waited_ns)
      .def_readonly("index", &ErrorRecord::index)
      .def_readonly("peer_kernel", &ErrorRecord::peer_kernel);
}

// Extra: the target's arguments after rank and device; `extra`: what pybind11 is told of them.
template <class Target, class... Extra, class... ToldOfExtra>
void bind_engine(pybind11::module_& m, const ToldOfExtra&... extra) {
  namespace py = pybind11;
  using namespace pybind11::literals;
  using Type = Engine<Target>;
  bind_records(m);
  bind_interrupts();
  py::class_<Type> engine(m, "Engine", py::module_local());
  engine.def(py::init([](int rank, int num_ranks, int device, std::vector<uintptr_t> peer_bases,
                         size_t heap_bytes, int num_max_experts, uint64_t timeout_ns,
                         bool begins_early, Extra... given) {
               const EngineOptions options{rank,       num_ranks,       device,     peer_bases,
                                           heap_bytes, num_max_experts, timeout_ns, begins_early};
               return std::make_unique<Type>(options, Target(rank, device, given...));
             }),
             py::kw_only(), "rank"_a, "num_ranks"_a, "device"_a, "peer_bases"_a, "heap_bytes"_a,
             "num_max_experts"_a, "timeout_ns"_a, "begins_early"_a = true, extra...);
  engine.def_static("workspace_bytes", &workspace_bytes, py::kw_only(), "num_ranks"_a,
                    "num_max_experts"_a);
  engine.def_static("ring_bytes", &ring_bytes, py::kw_only(), "num_ranks"_a, "num_channels"_a,
                    "num_slots"_a, "row_bytes"_a, "scale_row_bytes"_a, "num_topk"_a);
  engine.def_property_readonly("calls", [](const py::object& self) {
    return door_of(std::shared_ptr<EngineCalls>(owner_of(self), &self.cast<Type&>()));
  });
  engine.def_property_readonly("num_launches", &Type::num_launches);
  engine.def_property_readonly("begins_early", &Type::begins_early);
  engine.def_readwrite("smem_bytes_limit", &Type::smem_bytes_limit);
  engine.def_readwrite("skips_launches", &Type::skips_launches);

  engine.attr("traces_low_latency") = Target::kIsSynchronous || DEEP_COMM_TRACE_LOW_LATENCY != 0;
  engine.def("set_trace", &Type::set_trace, "slots"_a, "num_calls"_a);
  engine.def("set_generation", &Type::set_generation, "generation"_a,
             py::call_guard<py::gil_scoped_release>());

  engine.def_property_readonly("data_offset", &Type::data_offset);
  engine.def_property_readonly("data_bytes", &Type::data_bytes);
  engine.def("poll_error", &Type::poll_error);
  engine.def("begun_by_peer", &Type::begun_by_peer);
  engine.def("note_interrupt", &Type::note_interrupt);
  // These wait for the whole GPU, on which a kernel may wait for what another thread is to launch.
  engine.def("clear_error", &Type::clear_error, py::call_guard<py::gil_scoped_release>());
  engine.def("reset", &Type::reset, py::call_guard<py::gil_scoped_release>());
  engine.def(
      "shrink_barrier",
      [](Type& self, uint32_t absent, uint32_t number, uint64_t stream) {
        // The kernel may need what other threads of this process are about to launch.
        std::optional<py::gil_scoped_release> release;
        if (Target::kIsSynchronous || self.launches_block()) release.emplace();
        self.shrink_barrier(absent, number, stream);
      },
      py::kw_only(), "absent"_a, "number"_a, "stream"_a);
  // (number, whether all have met), once its kernel has ended.
  engine.def("shrink_barrier_result", [](const Type& self) {
    const ShrinkBarrierResult result = self.shrink_barrier_result();
    return py::make_tuple(result.number, result.has_agreed != 0);
  });
  engine.def("do_without", &Type::do_without, "absent"_a, py::call_guard<py::gil_scoped_release>());
  engine.def("close", &Type::close, py::call_guard<py::gil_scoped_release>());
  bind_low_latency<Target>(engine);
  bind_internode<Target>(engine);
}

}  // namespace deep_comm
