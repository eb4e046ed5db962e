// The kernels of device/examples on a simulated machine, for deep_comm.examples.
#include <string>

#include "bind/bindings.hpp"
#include "device/examples/one_flag.cuh"
#include "device/examples/ring.cuh"
#include "simt/machine.hpp"

namespace py = pybind11;

namespace deep_comm {
namespace {

template <void (*kKernel)(const examples::Args&)>
void body(const void* args) {
  kKernel(*static_cast<const examples::Args*>(args));
}

// One rank's half of an example, to its end.
void run_example(simt::Simulation& simulation, const std::string& name, int rank, uintptr_t memory,
                 int num_words, int num_rows, int num_slots, int num_threads) {
  const bool is_ring = name == "ring";
  if (!is_ring && name != "one_flag") {
    throw std::invalid_argument("name = " + name + ", must be one_flag or ring");
  }
  if (rank < 0 || rank > 1)
    throw std::invalid_argument("rank = " + std::to_string(rank) + ", must be 0 or 1");
  if (num_words < 1 || num_rows < 0 || num_slots < 1) {
    throw std::invalid_argument("num_words and num_slots must be at least 1, num_rows at least 0");
  }
  if (is_ring && num_threads != kWarpSize) {
    throw std::invalid_argument("num_threads = " + std::to_string(num_threads) +
                                ", must be one warp for the ring");
  }
  const examples::Args args{.memory = reinterpret_cast<uint64_t*>(memory),
                            .rank = rank,
                            .num_words = num_words,
                            .num_rows = num_rows,
                            .num_slots = num_slots};
  const simt::Grid grid{.kernel = is_ring ? "ring" : "one_flag",
                        .rank = rank,
                        .num_blocks = 1,
                        .num_threads = num_threads,
                        .smem_bytes = 0};
  simulation.launch(rank, 0, grid, is_ring ? body<examples::ring> : body<examples::one_flag>, &args,
                    sizeof args);
  simulation.synchronize(rank, 0);
}

}  // namespace

void bind_examples(py::module_& m) {
  m.def("run_example", &run_example, py::arg("simulation"), py::kw_only(), py::arg("name"),
        py::arg("rank"), py::arg("memory"), py::arg("num_words"), py::arg("num_rows") = 0,
        py::arg("num_slots") = 1, py::arg("num_threads") = 32,
        py::call_guard<py::gil_scoped_release>());
}

}  // namespace deep_comm
