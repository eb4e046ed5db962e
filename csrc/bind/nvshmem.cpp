// deep_comm._nvshmem: the rail over NVSHMEM. Its Python face is described in
// deep_comm/_nvshmem.pyi.
#include <pybind11/pybind11.h>

#include "host/nvshmem_module.hpp"

PYBIND11_MODULE(_nvshmem, m) {
  namespace py = pybind11;
  using namespace deep_comm;
  using namespace pybind11::literals;
  using Release = py::call_guard<py::gil_scoped_release>;
  m.doc() = "The rail over NVSHMEM: kernels between nodes, and the symmetric heap they work in.";
  m.attr("version") = nvshmem_module_version();
  m.def("kernels", [] { return reinterpret_cast<uintptr_t>(nvshmem_rail_kernels()); });
  m.def("is_up", &nvshmem_is_up);
  m.def("attach", &nvshmem_attach, Release());
  m.def("place", [] {
    const NvshmemPlace place = nvshmem_place();
    return py::make_tuple(place.pe, place.num_pes);
  });
  m.def("allocate", &nvshmem_allocate, Release(), "num_bytes"_a);
  m.def("release", &nvshmem_release, Release(), "address"_a);
  m.def("peer_address", &nvshmem_peer_address, "address"_a, "pe"_a);
  m.def("clear", &nvshmem_clear, Release(), "address"_a, "num_bytes"_a);
  m.def("settle", &nvshmem_settle, Release());
  m.def("queues", &nvshmem_queues, Release(), "num_qps"_a);
}
