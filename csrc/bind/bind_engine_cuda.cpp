#include "bind/bind_engine.hpp"
#include "bind/bind_internode.hpp"
#include "bind/bind_low_latency.hpp"
#include "host/target_cuda.hpp"

namespace deep_comm {

void bind_engine_cuda(pybind11::module_& m) {
  namespace py = pybind11;
  using namespace pybind11::literals;
  using Type = Engine<CudaTarget>;
  auto engine = bind_engine<CudaTarget>(m);
  bind_low_latency<CudaTarget>(engine);
  bind_internode<CudaTarget>(engine);
  engine.def(
      py::init([](int rank, int num_ranks, int device, std::vector<uintptr_t> peer_bases,
                  size_t heap_bytes, int num_max_experts, uint64_t timeout_ns, bool begins_early) {
        const EngineOptions options{rank,       num_ranks,       device,     peer_bases,
                                    heap_bytes, num_max_experts, timeout_ns, begins_early};
        return std::make_unique<Type>(options, CudaTarget(rank, device));
      }),
      py::kw_only(), "rank"_a, "num_ranks"_a, "device"_a, "peer_bases"_a, "heap_bytes"_a,
      "num_max_experts"_a, "timeout_ns"_a, "begins_early"_a = true);
}

}  // namespace deep_comm
