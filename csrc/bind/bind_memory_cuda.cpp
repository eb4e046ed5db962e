#include "bind/bindings.hpp"
#include "host/memory_cuda.hpp"

namespace deep_comm {

namespace py = pybind11;

void bind_memory_cuda(py::module_& m) {
  // Allocating and freeing wait for the device; the GIL is free meanwhile.
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  m.def("allocate", &cuda_allocate, py::arg("device"), py::arg("num_bytes"), Unlocked(),
        "Zeroed cudaMalloc memory, shareable by CUDA IPC.");
  m.def("free", &cuda_free, py::arg("device"), py::arg("address"), Unlocked());
  m.def(
      "ipc_handle", [](uintptr_t address) { return py::bytes(cuda_ipc_handle(address)); },
      py::arg("address"), "64 bytes naming the allocation to other processes of this host.");
  m.def(
      "ipc_open",
      [](int device, const py::bytes& handle) {
        const std::string handle_bytes = handle;
        py::gil_scoped_release unlocked;
        return cuda_ipc_open(device, handle_bytes);
      },
      py::arg("device"), py::arg("handle"));
  m.def("ipc_close", &cuda_ipc_close, py::arg("device"), py::arg("address"), Unlocked());
  m.def("enable_peer_access", &cuda_enable_peer_access, py::arg("device"), py::arg("peer_device"),
        Unlocked());
  m.def("can_access_peer", &cuda_can_access_peer, py::arg("device"), py::arg("peer_device"),
        Unlocked());
  m.def("num_sms", &cuda_num_sms, py::arg("device"), Unlocked());
}

}  // namespace deep_comm
