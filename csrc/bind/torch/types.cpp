#include "bind/torch/types.hpp"

#include <pybind11/gil_safe_call_once.h>

#include <algorithm>
#include <string>
#include <utility>

#include "host/require.hpp"

namespace py = pybind11;

namespace deep_comm {

namespace {

struct FixedType {
  const char* name;
  ElementType type;
};
constexpr FixedType kFixedTypes[] = {
    {"bool", kBool},       {"uint8", kUint8},
    {"int32", kInt32},     {"int64", kInt64},
    {"float16", kFloat16}, {"bfloat16", kBfloat16},
    {"float32", kFloat32}, {"float8_e4m3fn", kFloat8E4m3},
};
static_assert(std::size(kFixedTypes) == static_cast<size_t>(ScalarType::kFirstOther));

struct DlpackName {
  const char* name;
  DlDataType type;
};
constexpr DlpackName kDlpackNames[] = {
    {"bool", {6, 8, 1}},
    {"int8", {0, 8, 1}},
    {"int16", {0, 16, 1}},
    {"int32", {0, 32, 1}},
    {"int64", {0, 64, 1}},
    {"uint8", {1, 8, 1}},
    {"uint16", {1, 16, 1}},
    {"uint32", {1, 32, 1}},
    {"uint64", {1, 64, 1}},
    {"float16", {2, 16, 1}},
    {"float32", {2, 32, 1}},
    {"float64", {2, 64, 1}},
    {"bfloat16", {4, 16, 1}},
    {"complex32", {5, 32, 1}},
    {"complex64", {5, 64, 1}},
    {"complex128", {5, 128, 1}},
    {"float8_e4m3fn", {10, 8, 1}},
    {"float8_e4m3fnuz", {11, 8, 1}},
    {"float8_e5m2", {12, 8, 1}},
    {"float8_e5m2fnuz", {13, 8, 1}},
    {"float8_e8m0fnu", {14, 8, 1}},
    {"float4_e2m1fn_x2", {17, 4, 2}},
};

}  // namespace

const TorchTypes& TorchTypes::get() {
  // Importing torch may let go of the interpreter's lock, which C++'s own once would not survive.
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<const TorchTypes*> table;
  return *table.call_once_and_store_result([] { return new TorchTypes(); }).get_stored();
}

TorchTypes::TorchTypes() {
  const py::module_ torch = py::module_::import("torch");
  tensor_type_ = reinterpret_cast<PyTypeObject*>(py::object(torch.attr("Tensor")).release().ptr());
  entries_.resize(static_cast<size_t>(ScalarType::kFirstOther));
  for (const FixedType& fixed : kFixedTypes) {
    const py::object dtype = py::getattr(torch, fixed.name, py::none());
    if (!dtype.is_none()) add(fixed.type, dtype.ptr());
  }
  // By name, so that all ranks number them alike.
  const py::object dtype_type = torch.attr("dtype");
  std::vector<std::pair<std::string, py::object>> others;
  for (const auto& [name, value] : py::cast<py::dict>(torch.attr("__dict__"))) {
    if (py::type::handle_of(value).is(dtype_type)) {
      others.emplace_back(py::str(value), py::reinterpret_borrow<py::object>(value));
    }
  }
  std::sort(others.begin(), others.end(),
            [](const auto& one, const auto& other) { return one.first < other.first; });
  for (const auto& [name, dtype] : others) {
    if (of_dtype(dtype.ptr())) continue;  // a fixed one, or another name of the last
    add({static_cast<ScalarType>(entries_.size()), py::cast<uint8_t>(dtype.attr("itemsize"))},
        dtype.ptr());
  }
  for (const DlpackName& known : kDlpackNames) {
    const py::object dtype = py::getattr(torch, known.name, py::none());
    if (dtype.is_none()) continue;
    const ElementType type = *of_dtype(dtype.ptr());
    entries_[static_cast<size_t>(type.id)].dlpack = known.type;
    by_dlpack_[place_of(known.type)] = {known.type.lanes, {.type = type, .is_known = true}};
  }
  for (const char* prefix : {"int", "uint"}) {
    const uint8_t code = prefix[0] == 'u';
    bool& is_ambiguous = by_dlpack_[place_of({code, 8, 1})].found.is_ambiguous;
    for (int bits = 1; bits < 8; ++bits) {
      const std::string name = prefix + std::to_string(bits);
      is_ambiguous = is_ambiguous || py::hasattr(torch, name.c_str());
    }
  }
}

void TorchTypes::add(ElementType type, PyObject* dtype) {
  const auto place = static_cast<size_t>(type.id);
  if (place >= entries_.size()) entries_.resize(place + 1);
  Py_INCREF(dtype);
  entries_[place].dtype = dtype;
  entries_[place].type = type;
}

std::optional<ElementType> TorchTypes::of_dtype(PyObject* dtype) const {
  for (const Entry& entry : entries_) {
    if (entry.dtype == dtype) return entry.type;
  }
  return {};
}

PyObject* TorchTypes::dtype_of(ElementType type) const {
  const auto place = static_cast<size_t>(type.id);
  PyObject* dtype = place < entries_.size() ? entries_[place].dtype : nullptr;
  if (dtype == nullptr) {
    const bool is_fixed = place < std::size(kFixedTypes);
    fail(CallError::Class::kUnsupported,
         "this torch has no " +
             (is_fixed ? kFixedTypes[place].name : "type " + std::to_string(place)));
  }
  return dtype;
}

}  // namespace deep_comm
