#include <memory>

#include "bind/bindings.hpp"
#include "bind/doors.hpp"
#include "host/stream_cuda.hpp"

namespace deep_comm {

namespace py = pybind11;

void bind_stream_cuda(py::module_& m) {
  m.def(
      "streams",
      [](int device) { return door_of<StreamTarget>(std::make_shared<CudaStreams>(device)); },
      py::arg("device"));
  m.def("current_device", &cuda_current_device);
}

}  // namespace deep_comm
