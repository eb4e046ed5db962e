// Functions of plain numbers: they run in every step of "auto".
#include "bind/bindings.hpp"
#include "bind/host_counters.hpp"
#include "bind/numbers.hpp"

namespace deep_comm {

namespace py = pybind11;

namespace {

py::int_ publish(const HostCounters& counters, const std::array<uint64_t, 1>& numbers) {
  return counters.publish(numbers[0]);
}

py::object max_tokens(const HostCounters& counters, const std::array<uint64_t, 1>& numbers) {
  const std::optional<uint64_t> found = wait_for_max(counters, numbers[0]);
  if (!found) return py::none();
  return py::int_(*found);
}

py::int_ last_exchange(const HostCounters& counters, const std::array<uint64_t, 0>& /*none*/) {
  return counters.exchange();
}

void set_exchange(const HostCounters& counters, const std::array<uint64_t, 1>& numbers) {
  counters.set_exchange(numbers[0]);
}

}  // namespace

void bind_host_counters(py::module_& m) {
  m.def("host_counters_bytes", &HostCounters::num_bytes, py::arg("num_ranks"));
  m.def(
      "host_counters",
      [](uintptr_t address, int rank, int num_ranks, const py::object& owner) {
        const HostCounters counters(address, rank, num_ranks);
        return py::make_tuple(number_function<1, &publish>("publish", counters, owner),
                              number_function<1, &max_tokens>("max", counters, owner),
                              number_function<0, &last_exchange>("exchange", counters, owner),
                              number_function<1, &set_exchange>("set_exchange", counters, owner));
      },
      py::arg("address"), py::arg("rank"), py::arg("num_ranks"), py::arg("owner"));
}

}  // namespace deep_comm
