// What a Buffer makes tensors with, as Python builds it; see deep_comm/_core.pyi.
#include "bind/bindings.hpp"
#include "bind/interpreter.hpp"
#include "bind/torch/framework.hpp"

namespace py = pybind11;

namespace deep_comm {

void bind_torch(py::module_& m) {
  connect_interpreter();
  py::class_<Framework, std::shared_ptr<Framework>>(m, "Framework");
  py::class_<TorchFramework, Framework, std::shared_ptr<TorchFramework>>(m, "TorchFramework")
      .def(py::init<py::object, py::object, py::object, py::object>(), py::kw_only(),
           py::arg("device"), py::arg("comm_stream"), py::arg("exchange_api"),
           py::arg("current_stream"));
}

}  // namespace deep_comm
