// EarlyDispatches as tests/cpu/internode/test_early_internode.py uses it.
#include <pybind11/pybind11.h>

#include "host/row_forecast.hpp"

namespace py = pybind11;

namespace deep_comm::test {

void bind_forecast(py::module_& m) {
  using namespace pybind11::literals;
  py::class_<EarlyDispatches>(m, "EarlyDispatches", py::module_local())
      .def(py::init<>())
      .def("is_next", &EarlyDispatches::is_next)
      .def("learn", &EarlyDispatches::learn, "has_sent"_a);
}

}  // namespace deep_comm::test
