#include "bind/torch/reader.hpp"

#include <string>

namespace py = pybind11;

namespace deep_comm {

namespace {

// Interned once, never freed.
struct Names {
  PyObject *data_ptr, *device, *dtype, *shape, *stride;

  static const Names& get() {
    static const Names names;  // makes strings and nothing else: the lock is kept
    return names;
  }

 private:
  Names()
      : data_ptr(PyUnicode_InternFromString("data_ptr")),
        device(PyUnicode_InternFromString("device")),
        dtype(PyUnicode_InternFromString("dtype")),
        shape(PyUnicode_InternFromString("shape")),
        stride(PyUnicode_InternFromString("stride")) {}
};

py::object attribute(PyObject* object, PyObject* name) {
  return py::reinterpret_steal<py::object>(PyObject_GetAttr(object, name));
}
py::object call_method(PyObject* object, PyObject* name) {
  return py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(object, name));
}

// A tuple of integers; false: it is none. An error may be set.
bool read_extents(PyObject* tuple, int* num_dims, std::array<int64_t, kMaxTensorDims>* extents) {
  if (tuple == nullptr || !PyTuple_Check(tuple)) return false;
  *num_dims = static_cast<int>(PyTuple_GET_SIZE(tuple));
  if (*num_dims > kMaxTensorDims) return true;
  for (int dim = 0; dim < *num_dims; ++dim) {
    PyObject* extent = PyTuple_GET_ITEM(tuple, dim);
    if (!PyLong_Check(extent)) return false;  // torch's symbolic integers are none
    (*extents)[dim] = PyLong_AsLongLong(extent);
    if ((*extents)[dim] == -1 && PyErr_Occurred() != nullptr) return false;
  }
  return true;
}

}  // namespace

TorchDevice::TorchDevice(const py::object& given) {
  const std::string type = py::cast<std::string>(given.attr("type"));
  if (type != "cpu" && type != "cuda") {
    throw std::invalid_argument("device = " + type + ", must be cpu or cuda");
  }
  const py::object given_index = given.attr("index");
  const int32_t index = given_index.is_none() ? 0 : py::cast<int32_t>(given_index);
  const py::object make = py::module_::import("torch").attr("device");
  dlpack = {type == "cuda" ? kCuda : kHost, index};
  object = is_cuda() ? make(type, index) : make(type);
}

bool TorchDevice::is(PyObject* other) const {
  const int is_equal = PyObject_RichCompareBool(other, object.ptr(), Py_EQ);
  if (is_equal < 0) PyErr_Clear();
  return is_equal > 0;
}

const DlExchangeApi* find_exchange_api(const py::object& exchange_api) {
  if (exchange_api.is_none()) return nullptr;
  auto* api = static_cast<const DlExchangeApi*>(
      PyCapsule_GetPointer(exchange_api.ptr(), "dlpack_exchange_api"));
  if (api == nullptr) throw py::error_already_set();
  while (api != nullptr && api->major_version != 1) api = api->previous;
  const bool is_complete = api != nullptr && api->view != nullptr && api->to_python != nullptr &&
                           api->current_stream != nullptr;
  return is_complete ? api : nullptr;
}

TensorReader::TensorReader(const py::object& device, const py::object& exchange_api)
    : types_(TorchTypes::get()), device_(device), api_(find_exchange_api(exchange_api)) {}

TensorRef TensorReader::read(PyObject* object) const {
  TensorRef found;
  if (object == Py_None) return found;
  PyTypeObject* type = Py_TYPE(object);
  if (type == types_.tensor_type() && api_ != nullptr && read_described(object, &found)) {
    return found;
  }
  found = {};
  if (PyType_IsSubtype(type, types_.tensor_type()) == 0 || !read_attributes(object, &found)) {
    PyErr_Clear();
    found = {};
    found.kind = TensorRef::Kind::kOther;
  }
  found.object = object;
  return found;
}

// False, without an error, for what attributes must tell.
bool TensorReader::read_described(PyObject* object, TensorRef* out) const {
  DlTensor view;
  if (api_->view(object, &view) != 0) {
    PyErr_Clear();
    return false;
  }
  if (view.device.type != device_.dlpack.type || view.device.index != device_.dlpack.index) {
    return false;
  }
  const TorchTypes::FromDlpack found = types_.of_dlpack(view.dtype);
  if (!found.is_known) return false;
  out->type = found.type;
  if (found.is_ambiguous) {
    const py::object dtype = attribute(object, Names::get().dtype);
    const auto type = types_.of_dtype(dtype.ptr());
    if (!type) {
      PyErr_Clear();
      return false;
    }
    out->type = *type;
  }
  out->num_dims = view.num_dims;
  if (view.num_dims <= kMaxTensorDims) {
    if (view.num_dims > 0 && view.strides == nullptr) return false;
    for (int dim = 0; dim < view.num_dims; ++dim) {
      out->shape[dim] = view.shape[dim];
      out->strides[dim] = view.strides[dim];
    }
  }
  out->address = reinterpret_cast<uintptr_t>(view.data) + view.byte_offset;
  if (out->address == 0 && !out->is_empty()) return false;
  out->object = object;
  out->kind = TensorRef::Kind::kTensor;
  out->is_on_device = true;
  return true;
}

// False: it cannot be read; an error may be set.
bool TensorReader::read_attributes(PyObject* object, TensorRef* out) const {
  const Names& names = Names::get();
  const py::object device = attribute(object, names.device);
  if (!device) return false;
  out->is_on_device = device_.is(device.ptr());
  const py::object dtype = attribute(object, names.dtype);
  const auto type = types_.of_dtype(dtype.ptr());
  if (!type) return false;
  out->type = *type;
  const py::object shape = attribute(object, names.shape);
  if (!read_extents(shape.ptr(), &out->num_dims, &out->shape)) return false;
  out->kind = TensorRef::Kind::kTensor;
  if (!out->is_on_device) return true;  // it may have neither strides nor memory
  const py::object strides = call_method(object, names.stride);
  int num_strides = 0;
  if (!read_extents(strides.ptr(), &num_strides, &out->strides)) return false;
  const py::object address = call_method(object, names.data_ptr);
  if (!address || !PyLong_Check(address.ptr())) return false;
  out->address = PyLong_AsUnsignedLongLong(address.ptr());
  if (PyErr_Occurred() != nullptr || num_strides != out->num_dims) return false;
  return out->address != 0 || out->is_empty();
}

IntegerRef read_integer(PyObject* object) {
  IntegerRef found;
  found.object = object;
  found.is_given = object != Py_None;
  found.is_integer = PyLong_Check(object) != 0;
  if (found.is_integer) {
    int overflow = 0;
    found.value = PyLong_AsLongLongAndOverflow(object, &overflow);
    found.fits = overflow == 0;
  }
  return found;
}

bool read_flag(PyObject* object) {
  const int is_true = PyObject_IsTrue(object);
  if (is_true < 0) throw py::error_already_set();
  return is_true > 0;
}

}  // namespace deep_comm
