// The readers and makers of tensors, errors and functions of csrc/bind as
// tests/cpu/host/test_torch_leaf.py uses them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "bind/errors.hpp"
#include "bind/function.hpp"
#include "bind/interpreter.hpp"
#include "bind/interrupts.hpp"
#include "bind/torch/framework.hpp"
#include "bind/torch/reader.hpp"
#include "host/interpreter.hpp"
#include "host/require.hpp"

namespace py = pybind11;

namespace deep_comm::test {

namespace {

ElementType type_of(const py::object& dtype) {
  return TorchTypes::get().of_dtype(dtype.ptr()).value();
}

py::dict described(const TensorRef& found) {
  static constexpr const char* kKinds[] = {"absent", "tensor", "other"};
  const int known = found.num_dims > kMaxTensorDims ? 0 : found.num_dims;
  py::dict all;
  all["kind"] = kKinds[static_cast<int>(found.kind)];
  all["object"] = found.object == nullptr
                      ? py::none()
                      : py::reinterpret_borrow<py::object>(
                            static_cast<PyObject*>(const_cast<void*>(found.object)));
  all["is_on_device"] = found.is_on_device;
  all["dtype"] = found.kind == TensorRef::Kind::kTensor
                     ? py::reinterpret_borrow<py::object>(TorchTypes::get().dtype_of(found.type))
                     : py::none();
  all["num_bytes"] = found.type.num_bytes;
  all["num_dims"] = found.num_dims;
  all["shape"] = std::vector<int64_t>(found.shape.begin(), found.shape.begin() + known);
  all["strides"] = std::vector<int64_t>(found.strides.begin(), found.strides.begin() + known);
  all["address"] = found.address;
  all["is_contiguous"] = found.is_contiguous();
  return all;
}

TensorSpec spec_of(const std::vector<int64_t>& shape, const py::object& strides,
                   const py::object& dtype) {
  TensorSpec spec = TensorSpec::of(type_of(dtype), {});
  spec.num_dims = static_cast<int>(shape.size());
  int64_t stride = 1;
  for (int dim = spec.num_dims - 1; dim >= 0; --dim) {
    spec.shape[dim] = shape[dim];
    spec.strides[dim] = stride;
    stride *= shape[dim] > 1 ? shape[dim] : 1;
  }
  if (!strides.is_none()) {
    int dim = 0;
    for (const py::handle given : strides) spec.strides[dim++] = py::cast<int64_t>(given);
  }
  return spec;
}

// Calls `ended` when the last tensor over its memory has gone.
struct Owner {
  explicit Owner(py::object ended) : ended(std::move(ended)) {}
  ~Owner() { ended(); }
  py::object ended;
};

// What a call raises, by name.
struct Thrower {
  py::object raise(const Arguments<2>& given) {
    const std::string what = py::cast<std::string>(given[0]);
    const void* object = given[1];
    using Class = CallError::Class;
    using Which = GivenProperty::Which;
    const auto property = [&](Which which) { return given_property(which, object); };
    if (what == "value") refuse_argument("x", property(Which::kValue), "must be y");
    if (what == "type_name") refuse_argument("x", property(Which::kTypeName), "must be y");
    if (what == "repr") refuse_argument("x", property(Which::kReprAndType), "must be y");
    if (what == "device") refuse_argument("x", property(Which::kDevice), "must be y");
    if (what == "type") refuse_argument("x", property(Which::kType), "must be y");
    if (what == "shape") refuse_argument("x", property(Which::kShape), "must be y");
    if (what == "nothing") refuse_argument("x", {}, "must be y");
    if (what == "string") refuse_argument("x", std::string("17 bytes"), "must be y");
    if (what == "number") refuse_argument("x", int64_t{17}, "must be y");
    if (what == "flag") refuse_argument("x", true, "must be y");
    if (what == "handle") refuse_handle(std::string("3 rows"), "must be another");
    if (what == "unsupported") fail(Class::kUnsupported, "not here");
    if (what == "destroyed") fail(Class::kBufferDestroyed, "it was");
    if (what == "general") fail(Class::kGeneral, "it is");
    if (what == "recorded") fail(Class::kRecorded, "a kernel failed");
    if (what == "small") {
      CallError error;
      error.error_class = Class::kBufferTooSmall;
      error.argument = "num_rdma_bytes";
      error.value = int64_t{10};
      error.needed_bytes = 20;
      error.rule = "this call";
      throw error;
    }
    if (what == "python") return py::reinterpret_borrow<py::function>(given[1])();
    if (what == "standard") throw std::invalid_argument("of C++");
    if (what == "interrupted") {
      PyErr_SetNone(PyExc_KeyboardInterrupt);
      throw deep_comm::detail::PythonInterrupted();
    }
    return py::reinterpret_borrow<py::object>(given[1]);
  }
};

int enter_call(Thrower& /*self*/) { return 0; }  // it has no Buffer

}  // namespace

void bind_torch_leaf(py::module_& m) {
  using namespace pybind11::literals;
  connect_interpreter();
  py::class_<TensorReader>(m, "TensorReader", py::module_local())
      .def(py::init<py::object, py::object>(), "device"_a, "exchange_api"_a)
      .def("read", [](const TensorReader& self, py::object object) {
        const TensorRef found = self.read(object.ptr());
        if (PyErr_Occurred() != nullptr) throw py::error_already_set();
        return described(found);
      });
  py::class_<TorchFramework>(m, "TorchFramework", py::module_local())
      .def(py::init<py::object, py::object, py::object, py::object>(), py::kw_only(), "device"_a,
           "comm_stream"_a, "exchange_api"_a, "current_stream"_a)
      .def("current_stream", &TorchFramework::current_stream)
      .def("current_stream_object",
           [](const TorchFramework& self) {
             py::object stream = to_python(self.current_stream_object());
             return stream ? stream : py::none();
           })
      .def("set_current_stream",
           [](TorchFramework& self, py::object stream) {
             self.set_current_stream(Object::borrow(stream.is_none() ? nullptr : stream.ptr()));
           })
      .def(
          "empty",
          [](TorchFramework& self, const std::vector<int64_t>& shape, py::object strides,
             py::object dtype, bool on_comm) {
            const TensorSpec spec = spec_of(shape, strides, dtype);
            MadeTensor made = on_comm ? self.empty_on_comm(spec) : self.empty(spec);
            return py::make_tuple(to_python(std::move(made.tensor)), made.address);
          },
          "shape"_a, "strides"_a, "dtype"_a, "on_comm"_a = false)
      .def(
          "over",
          [](TorchFramework& self, uintptr_t address, const std::vector<int64_t>& shape,
             py::object strides, py::object dtype, py::object ended) {
            return to_python(self.over(address, spec_of(shape, strides, dtype),
                                       std::make_shared<Owner>(std::move(ended))));
          },
          "address"_a, "shape"_a, "strides"_a, "dtype"_a, "ended"_a)
      .def("record_on_comm",
           [](TorchFramework& self, py::object tensor) { self.record_on_comm(tensor.ptr()); })
      .def("record_on_current",
           [](TorchFramework& self, py::object tensor) { self.record_on_current(tensor.ptr()); })
      .def("comm_waits_for",
           [](TorchFramework& self, py::object event) { self.comm_waits_for(event.ptr()); });
  m.def("read_integer", [](py::object object) {
    const IntegerRef found = read_integer(object.ptr());
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    return py::make_tuple(found.is_given, found.is_integer, found.fits, found.value);
  });
  m.def("read_flag", [](py::object object) { return read_flag(object.ptr()); });
  m.def("thrower", [](py::object raise_recorded) {
    return method_function<&Thrower::raise>("raise_", std::make_shared<Thrower>(),
                                            std::move(raise_recorded));
  });
  m.def("raise_through_pybind11", [] { refuse_argument("x", int64_t{17}, "must be y"); });
  // Another thread runs `other` meanwhile.
  m.def("unlocked", [](py::object other) {
    {
      const InterpreterUnlocked unlocked;
      const py::gil_scoped_acquire lock;
      other();
    }
  });
  m.def("report_unraisable", [](py::object raises) {
    try {
      raises();
    } catch (...) {
      report_unraisable("a place");
    }
  });
}

}  // namespace deep_comm::test
