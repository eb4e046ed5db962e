#include <pybind11/stl.h>

#include "bind/bindings.hpp"
#include "host/link_bench_cuda.hpp"

namespace deep_comm {

void bind_bench_cuda(pybind11::module_& m) {
  namespace py = pybind11;
  using namespace pybind11::literals;
  m.def(
      "push_rows",
      [](std::vector<uintptr_t> destinations, uintptr_t src, int rank, int num_rows_per_peer,
         int row_bytes, int num_blocks, int num_warps, uint64_t stream) {
        cuda_push_rows({.destinations = std::move(destinations),
                        .src = src,
                        .rank = rank,
                        .num_rows_per_peer = num_rows_per_peer,
                        .row_bytes = row_bytes,
                        .num_blocks = num_blocks,
                        .num_warps = num_warps,
                        .stream = stream});
      },
      py::kw_only(), "destinations"_a, "src"_a, "rank"_a, "num_rows_per_peer"_a, "row_bytes"_a,
      "num_blocks"_a, "num_warps"_a, "stream"_a);
  m.def("max_push_warps", &cuda_max_push_warps, "row_bytes"_a);
  m.def("launch_empty", &cuda_launch_empty, "stream"_a);
  m.def("copy_async", &cuda_copy_async, py::kw_only(), "dst"_a, "src"_a, "num_bytes"_a, "stream"_a);
}

}  // namespace deep_comm
