#include "bind/bind_engine.hpp"
#include "host/target_host.hpp"

namespace deep_comm {

void bind_engine_host(pybind11::module_& m) {
  using namespace pybind11::literals;
  bind_engine<HostTarget, simt::Simulation*>(
      m, "simulation"_a.none(true) = static_cast<simt::Simulation*>(nullptr),
      pybind11::keep_alive<1, 10>());
}

}  // namespace deep_comm
