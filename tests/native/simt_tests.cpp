// deep_comm._simt_tests: runs the test kernels of this folder by name.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <string>
#include <vector>

#include "bind/bindings.hpp"
#include "simt/stack_pool.hpp"
#include "test_kernel.hpp"

namespace py = pybind11;

namespace deep_comm::test {

void bind_backlog(py::module_& m);       // backlog_binding.cpp
void bind_torch_leaf(py::module_& m);    // torch_binding.cpp
void bind_call_order(py::module_& m);    // call_order_binding.cpp
void bind_fake_streams(py::module_& m);  // fake_streams.cpp
void bind_forecast(py::module_& m);      // forecast_binding.cpp
void bind_ring_plan(py::module_& m);     // ring_plan_binding.cpp

namespace {

using Memory = py::array_t<uint64_t, py::array::c_style>;

const Kernel& find_kernel(const std::string& name) {
  for (const auto kernels :
       {warp_kernels(), block_kernels(), error_kernels(), bulk_kernels(), memory_kernels(),
        waiting_kernels(), push_kernels(), race_kernels(), launch_kernels()}) {
    for (const Kernel& kernel : kernels) {
      if (name == kernel.name) return kernel;
    }
  }
  throw std::invalid_argument("no test kernel '" + name + "'");
}

struct Launch {
  simt::Grid grid;
  simt::Body body;
  Args args;
};

// kernel, rank, num_blocks, num_threads, smem_bytes, params
Launch make_launch(Memory& memory, const std::string& name, int rank, int num_blocks,
                   int num_threads, size_t smem_bytes, const std::vector<int64_t>& params) {
  const Kernel& kernel = find_kernel(name);
  Launch launch{.grid = {.kernel = kernel.name,
                         .rank = rank,
                         .num_blocks = num_blocks,
                         .num_threads = num_threads,
                         .smem_bytes = smem_bytes},
                .body = kernel.body,
                .args = {.memory = memory.mutable_data(), .rank = rank, .params = {}}};
  std::copy_n(params.begin(), std::min<size_t>(params.size(), 8), launch.args.params);
  return launch;
}

void run(Memory memory, const std::string& kernel, int rank, int num_blocks, int num_threads,
         size_t smem_bytes, const std::vector<int64_t>& params) {
  const Launch launch =
      make_launch(memory, kernel, rank, num_blocks, num_threads, smem_bytes, params);
  py::gil_scoped_release release;
  simt::run(launch.grid, launch.body, &launch.args);
}

void launch(simt::Simulation& simulation, uint64_t stream, Memory memory, const std::string& kernel,
            int rank, int num_blocks, int num_threads, size_t smem_bytes,
            const std::vector<int64_t>& params, const std::string& begin) {
  Launch launch = make_launch(memory, kernel, rank, num_blocks, num_threads, smem_bytes, params);
  launch.grid.begin = begin == "early"    ? simt::Begin::kEarly
                      : begin == "beside" ? simt::Begin::kBeside
                                          : simt::Begin::kBehind;
  py::gil_scoped_release release;
  simulation.launch(rank, stream, launch.grid, launch.body, &launch.args, sizeof launch.args);
}

uint16_t bf16_bits(float value) { return arch::float_to_bf16(value).bits; }
uint16_t fp16_bits(float value) { return arch::float_to_fp16(value).bits; }
float bf16_value(uint16_t bits) { return arch::bf16_to_float(Bf16{bits}); }
float fp16_value(uint16_t bits) { return arch::fp16_to_float(Fp16{bits}); }

}  // namespace
}  // namespace deep_comm::test

PYBIND11_MODULE(_simt_tests, m) {
  using namespace deep_comm;
  bind_simulation(m);
  test::bind_backlog(m);
  test::bind_torch_leaf(m);
  test::bind_call_order(m);
  test::bind_fake_streams(m);
  test::bind_forecast(m);
  test::bind_ring_plan(m);
  m.def("run", &test::run, py::kw_only(), py::arg("memory").noconvert(), py::arg("kernel"),
        py::arg("rank"), py::arg("num_blocks"), py::arg("num_threads"), py::arg("smem_bytes"),
        py::arg("params"));
  m.def("launch", &test::launch, py::arg("simulation"), py::kw_only(), py::arg("stream"),
        py::arg("memory").noconvert(), py::arg("kernel"), py::arg("rank"), py::arg("num_blocks"),
        py::arg("num_threads"), py::arg("smem_bytes"), py::arg("params"), py::arg("begin"));
  m.def(
      "synchronize",
      [](simt::Simulation& simulation, int rank, uint64_t stream) {
        simulation.synchronize(rank, stream);
      },
      py::arg("simulation"), py::arg("rank"), py::arg("stream"),
      py::call_guard<py::gil_scoped_release>());
  m.def("refuse_guard_pages",
        [](bool refuse) { simt::StackPool::instance().refuse_guard_pages(refuse); });
  m.def("float_to_bf16", py::vectorize(&test::bf16_bits));
  m.def("float_to_fp16", py::vectorize(&test::fp16_bits));
  m.def("bf16_to_float", py::vectorize(&test::bf16_value));
  m.def("fp16_to_float", py::vectorize(&test::fp16_value));
}
