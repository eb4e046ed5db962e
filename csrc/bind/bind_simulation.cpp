// Simulation and the executor's errors. Local to the module, so that another module with an
// executor of its own (the native tests) can be loaded beside this one.
#include <pybind11/stl.h>

#include <tuple>

#include "bind/bindings.hpp"
#include "simt/machine.hpp"

namespace py = pybind11;

namespace deep_comm {
namespace {

using StallTuple = std::tuple<int, uint64_t, uint64_t>;

std::unique_ptr<simt::Simulation> make_simulation(
    int num_ranks, uint64_t seed, std::string policy, bool weak_memory, bool delay_bulk,
    bool collectives_order_memory, bool allow_late_loads, bool find_races,
    std::vector<std::string> faults, const std::vector<StallTuple>& stalls, std::string on_stuck,
    std::string weaken, bool note_sites) {
  simt::SimulationOptions options{.num_ranks = num_ranks,
                                  .seed = seed,
                                  .policy = std::move(policy),
                                  .weak_memory = weak_memory,
                                  .delay_bulk = delay_bulk,
                                  .collectives_order_memory = collectives_order_memory,
                                  .allow_late_loads = allow_late_loads,
                                  .find_races = find_races,
                                  .faults = std::move(faults),
                                  .weaken = std::move(weaken),
                                  .note_sites = note_sites,
                                  .stalls = {},
                                  .on_stuck = std::move(on_stuck)};
  for (const auto& [rank, after_step, num_steps] : stalls) {
    options.stalls.push_back({.rank = rank, .after_step = after_step, .num_steps = num_steps});
  }
  return std::make_unique<simt::Simulation>(options);
}

// Waiting for the other ranks needs their threads to run Python meanwhile.
std::vector<py::bytes> exchange(simt::Simulation& simulation, int rank, const py::bytes& payload) {
  auto own = static_cast<std::string>(payload);
  std::vector<std::string> gathered;
  {
    py::gil_scoped_release release;
    gathered = simulation.exchange(rank, std::move(own));
  }
  return {gathered.begin(), gathered.end()};
}

}  // namespace

void bind_simulation(py::module_& m) {
  const auto& machine_error =
      py::register_local_exception<simt::MachineError>(m, "MachineError", PyExc_RuntimeError);
  py::register_local_exception<simt::SimulationStuck>(m, "SimulationStuck", machine_error);

  using simt::RailTraffic;
  using simt::Simulation;
  py::class_<RailTraffic>(m, "RailTraffic", py::module_local())
      .def_readonly("rank", &RailTraffic::rank)
      .def_readonly("node", &RailTraffic::peer)
      .def_readonly("qp", &RailTraffic::qp)
      .def_readonly("num_puts", &RailTraffic::num_puts)
      .def_readonly("num_put_bytes", &RailTraffic::num_put_bytes)
      .def_readonly("num_signals", &RailTraffic::num_signals);
  const auto release_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<Simulation>(m, "Simulation", py::module_local())
      .def(py::init(&make_simulation), py::kw_only(), py::arg("num_ranks"), py::arg("seed"),
           py::arg("policy") = "random", py::arg("weak_memory") = true,
           py::arg("delay_bulk") = true, py::arg("collectives_order_memory") = false,
           py::arg("allow_late_loads") = false, py::arg("find_races") = false,
           py::arg("faults") = std::vector<std::string>(),
           py::arg("stalls") = std::vector<StallTuple>(), py::arg("on_stuck") = "report",
           py::arg("weaken") = "", py::arg("note_sites") = false)
      .def_property_readonly("num_steps", py::cpp_function(&Simulation::num_steps, release_gil))
      .def_property_readonly("time_ns", py::cpp_function(&Simulation::time_ns, release_gil))
      .def("exchange", &exchange, py::arg("rank"), py::arg("payload"))
      .def("leave", &Simulation::leave, py::arg("rank"), release_gil)
      .def("kill", &Simulation::kill, py::arg("rank"), release_gil)
      .def("stall_rail", &Simulation::stall_rail, py::arg("rank"), release_gil)
      .def("rail_traffic", &Simulation::rail_traffic, release_gil)
      .def("visited_sites", &Simulation::visited_sites, release_gil)
      .def("describe", &Simulation::describe, release_gil);
}

}  // namespace deep_comm
