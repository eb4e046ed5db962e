#include "bind/bind_engine.hpp"
#include "bind/bind_internode.hpp"
#include "bind/bind_low_latency.hpp"
#include "host/target_host.hpp"

namespace deep_comm {

void bind_engine_host(pybind11::module_& m) {
  namespace py = pybind11;
  using namespace pybind11::literals;
  using Type = Engine<HostTarget>;
  auto engine = bind_engine<HostTarget>(m);
  bind_low_latency<HostTarget>(engine);
  bind_internode<HostTarget>(engine);
  engine.def(py::init([](int rank, int num_ranks, int device, std::vector<uintptr_t> peer_bases,
                         size_t heap_bytes, int num_max_experts, uint64_t timeout_ns,
                         bool begins_early, simt::Simulation* simulation) {
               const EngineOptions options{rank,       num_ranks,       device,     peer_bases,
                                           heap_bytes, num_max_experts, timeout_ns, begins_early};
               return std::make_unique<Type>(options, HostTarget(rank, device, simulation));
             }),
             py::kw_only(), "rank"_a, "num_ranks"_a, "device"_a, "peer_bases"_a, "heap_bytes"_a,
             "num_max_experts"_a, "timeout_ns"_a, "begins_early"_a = true,
             "simulation"_a.none(true) = static_cast<simt::Simulation*>(nullptr),
             py::keep_alive<1, 10>());
}

}  // namespace deep_comm
