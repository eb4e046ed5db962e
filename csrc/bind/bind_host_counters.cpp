#include <pybind11/stl.h>

#include "bind/bindings.hpp"
#include "bind/host_counters.hpp"
#include "host/segment.hpp"

namespace deep_comm {

void bind_host_counters(pybind11::module_& m) {
  namespace py = pybind11;
  using namespace pybind11::literals;
  py::class_<HostCounters>(m, "HostCounters", py::module_local(),
                           "One rank's view of counters that the ranks of a host share.")
      .def(py::init([](const Segment& segment, int rank, int num_ranks) {
             return HostCounters(segment.address(), rank, num_ranks);
           }),
           "segment"_a, "rank"_a, "num_ranks"_a, py::keep_alive<1, 2>())
      .def_static("num_bytes", &HostCounters::num_bytes, "num_ranks"_a)
      .def("publish", &HostCounters::publish, "num_tokens"_a)
      .def("max", &wait_for_max, "exchange"_a)
      .def("exchange", &HostCounters::exchange)
      .def("set_exchange", &HostCounters::set_exchange, "exchange"_a);
}

}  // namespace deep_comm
