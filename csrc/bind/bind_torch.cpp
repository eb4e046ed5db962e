// What a Buffer makes tensors with, as Python builds it; see deep_comm/_core.pyi.
#include "bind/bindings.hpp"
#include "bind/interpreter.hpp"
#include "bind/torch/framework.hpp"
#include "bind/torch/types.hpp"
#include "host/calls/payload_form.hpp"

namespace py = pybind11;

namespace deep_comm {

void bind_torch(py::module_& m) {
  connect_interpreter();
  py::class_<Framework, std::shared_ptr<Framework>>(m, "Framework");
  py::class_<TorchFramework, Framework, std::shared_ptr<TorchFramework>>(m, "TorchFramework")
      .def(py::init<py::object, py::object, py::object, py::object>(), py::kw_only(),
           py::arg("device"), py::arg("comm_stream"), py::arg("exchange_api"),
           py::arg("current_stream"));
  m.def(
      "payload_dtypes",
      [](int word) {
        const auto dtype_of = [](ScalarType type) {
          return py::reinterpret_borrow<py::object>(TorchTypes::get().dtype_of({type, 0}));
        };
        const PayloadDtypes dtypes = PayloadDtypes::of(word);
        return py::make_tuple(dtype_of(dtypes.x),
                              dtypes.scales ? dtype_of(*dtypes.scales) : py::none());
      },
      py::arg("word"));
}

}  // namespace deep_comm
