// RailBacklog as tests/cpu/kernels/test_rail_backlog.py uses it: addresses are numbers,
// and nothing is followed.
#include <pybind11/pybind11.h>

#include "host/rail_backlog.hpp"

namespace py = pybind11;

namespace deep_comm::test {

void bind_backlog(py::module_& m) {
  using namespace pybind11::literals;
  py::class_<RailBacklog>(m, "RailBacklog")
      .def(py::init<int, double, uint64_t>(), "num_queues"_a, "bytes_per_s"_a, "ahead_ns"_a = 0)
      .def_property_readonly("is_empty", &RailBacklog::is_empty)
      .def_readonly_static("max_put_bytes", &RailBacklog::kMaxPutBytes)
      .def(
          "push",
          [](RailBacklog& self, int queue, uintptr_t dst, uintptr_t src, uint64_t num_bytes,
             uint64_t value, uint64_t now_ns) {
            self.push(queue, {reinterpret_cast<uint8_t*>(dst),
                              reinterpret_cast<const uint8_t*>(src), num_bytes, value, now_ns});
          },
          "queue"_a, "dst"_a, "src"_a, "num_bytes"_a, "value"_a, "now_ns"_a)
      .def(
          "advance",
          [](RailBacklog& self, uint64_t now_ns, bool with_times) {
            py::list moved;
            self.advance(now_ns, [&](int queue, const NicOp& op) {
              if (with_times) {
                moved.append(py::make_tuple(queue, op.num_bytes, op.at_ns));
                return;
              }
              moved.append(py::make_tuple(queue, reinterpret_cast<uintptr_t>(op.dst),
                                          reinterpret_cast<uintptr_t>(op.src), op.num_bytes,
                                          op.value));
            });
            return moved;
          },
          "now_ns"_a, "with_times"_a = false);
}

}  // namespace deep_comm::test
