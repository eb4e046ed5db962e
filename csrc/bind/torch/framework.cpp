#include "bind/torch/framework.hpp"

#include <utility>

#include "bind/interpreter.hpp"
#include "host/require.hpp"

namespace py = pybind11;

namespace deep_comm {

namespace {

py::object checked(PyObject* made) {
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

py::handle borrowed(const void* object) {
  return static_cast<PyObject*>(const_cast<void*>(object));
}

py::object tuple_of(const int64_t* numbers, int size) {
  py::object made = checked(PyTuple_New(size));
  for (int place = 0; place < size; ++place) {
    PyTuple_SET_ITEM(made.ptr(), place,
                     checked(PyLong_FromLongLong(numbers[place])).release().ptr());
  }
  return made;
}
py::object shape_of(const TensorSpec& spec) { return tuple_of(spec.shape.data(), spec.num_dims); }
py::object strides_of(const TensorSpec& spec) {
  return tuple_of(spec.strides.data(), spec.num_dims);
}

// Of the memory from the first element to the last.
TensorSpec bytes_of(const TensorSpec& spec) {
  int64_t span = spec.num_elements() > 0 ? 1 : 0;
  for (int dim = 0; span > 0 && dim < spec.num_dims; ++dim) {
    span += (spec.shape[dim] - 1) * spec.strides[dim];
  }
  return TensorSpec::of(kUint8, {span * spec.type.num_bytes});
}

// As a type that torch can neither make nor take.
py::object viewed(const py::object& bytes, const TensorSpec& spec, PyObject* dtype) {
  return bytes.attr("view")(py::handle(dtype)).attr("as_strided")(shape_of(spec), strides_of(spec));
}

// While torch's algorithms are to be deterministic it fills new tensors on the current stream, where
// kernels on the communication stream need not wait for that. They write what they own: no fill.
class Unfilled {
 public:
  Unfilled(const py::object& is_deterministic, const py::object& settings) {
    if (!py::cast<bool>(is_deterministic())) return;
    before_ = settings.attr(kName);
    settings.attr(kName) = false;
    settings_ = settings;
  }
  ~Unfilled() {
    if (!settings_) return;
    const py::error_scope kept;
    if (PyObject_SetAttrString(settings_.ptr(), kName, before_.ptr()) != 0) PyErr_Clear();
  }
  Unfilled(const Unfilled&) = delete;
  Unfilled& operator=(const Unfilled&) = delete;

 private:
  static constexpr char kName[] = "fill_uninitialized_memory";
  py::object settings_, before_;
};

// One of the functions that the code of torch's compiler makes tensors with: no dispatch, no keywords,
// no fill, so half the host time. None if this torch lacks it, or if the public function has been
// replaced, whose replacement is to be called then.
py::object compiled_code_function(const char* name, const py::object& public_function) {
  if (PyCFunction_CheckExact(public_function.ptr()) == 0) return py::none();
  try {
    return py::module_::import("torch._C._dynamo.guards").attr(name);
  } catch (py::error_already_set&) {
    return py::none();
  }
}

}  // namespace

TorchFramework::TorchFramework(const py::object& device, py::object comm_stream,
                               const py::object& exchange_api, py::object current_stream)
    : types_(TorchTypes::get()),
      device_(device),
      reader_(device, exchange_api),
      api_(find_exchange_api(exchange_api)),
      comm_stream_(std::move(comm_stream)),
      current_stream_(std::move(current_stream)) {
  const py::module_ torch = py::module_::import("torch");
  torch_cuda_ = torch.attr("cuda");
  empty_strided_ = torch.attr("empty_strided");
  empty_directly_ = compiled_code_function(
      device_.is_cuda() ? "_empty_strided_cuda" : "_empty_strided_cpu", empty_strided_);
  range_directly_ = compiled_code_function("_reinterpret_tensor", empty_strided_);
  from_dlpack_ = torch.attr("from_dlpack");
  is_deterministic_ = torch.attr("are_deterministic_algorithms_enabled");
  deterministic_ = torch.attr("utils").attr("deterministic");
  is_inference_mode_ = torch.attr("is_inference_mode_enabled");
  inference_mode_ = torch.attr("inference_mode");
  // The device is always named: a program's default device is not for a Buffer's tensors.
  options_ = py::make_tuple("dtype", "device");
}

// ---- streams --------------------------------------------------------------------------------------

py::object TorchFramework::of_cuda(const char* name) const { return torch_cuda_.attr(name); }

py::object TorchFramework::torch_stream() const {
  return of_cuda("current_stream")(device_.dlpack.index);
}

uint64_t TorchFramework::current_stream() const {
  if (!current_stream_.is_none()) {
    const py::object number = checked(PyObject_CallNoArgs(current_stream_.ptr()));
    return py::cast<uint64_t>(number);
  }
  if (!device_.is_cuda()) return 0;
  if (api_ == nullptr) return py::cast<uint64_t>(torch_stream().attr("cuda_stream"));
  void* stream = nullptr;
  if (api_->current_stream(device_.dlpack.type, device_.dlpack.index, &stream) != 0) {
    throw py::error_already_set();
  }
  return reinterpret_cast<uint64_t>(stream);
}

Object TorchFramework::current_stream_object() const {
  return has_streams() ? to_object(torch_stream()) : Object();
}

void TorchFramework::set_current_stream(const Object& stream) {
  if (stream) of_cuda("set_stream")(borrowed(stream.get()));
}

void TorchFramework::record(const void* tensor, const py::object& stream) const {
  const TensorRef found = reader_.read(borrowed(tensor).ptr());
  if (found.kind == TensorRef::Kind::kTensor && found.num_dims <= kMaxTensorDims &&
      found.is_empty()) {
    return;
  }
  borrowed(tensor).attr("record_stream")(stream);
}

void TorchFramework::record_on_comm(const void* tensor) {
  if (has_streams()) record(tensor, comm_stream_);
}

void TorchFramework::record_on_current(const void* tensor) {
  if (has_streams()) record(tensor, torch_stream());
}

void TorchFramework::comm_waits_for(const void* event) {
  if (has_streams()) borrowed(event).attr("stream_wait")(comm_stream_);
}

// ---- new tensors ------------------------------------------------------------------------------------

py::object TorchFramework::make_strided(const TensorSpec& spec) const {
  const py::object shape = shape_of(spec), strides = strides_of(spec);
  if (!empty_directly_.is_none()) {
    PyObject* const arguments[] = {shape.ptr(), strides.ptr(), types_.dtype_of(spec.type)};
    return checked(PyObject_Vectorcall(empty_directly_.ptr(), arguments, 3, nullptr));
  }
  std::optional<Unfilled> unfilled;
  if (has_streams()) unfilled.emplace(is_deterministic_, deterministic_);
  PyObject* const arguments[] = {shape.ptr(), strides.ptr(), types_.dtype_of(spec.type),
                                 device_.object.ptr()};
  return checked(PyObject_Vectorcall(empty_strided_.ptr(), arguments, 2, options_.ptr()));
}

py::object TorchFramework::make_empty(const TensorSpec& spec) const {
  const bool is_common = spec.type.id < ScalarType::kFirstOther || types_.dlpack_of(spec.type);
  if (is_common) return make_strided(spec);
  return viewed(make_strided(bytes_of(spec)), spec, types_.dtype_of(spec.type));
}

MadeTensor TorchFramework::empty(const TensorSpec& spec) {
  py::object tensor = make_empty(spec);
  const TensorRef found = reader_.read(tensor.ptr());
  if (found.kind != TensorRef::Kind::kTensor || !found.is_on_device) {
    fail(CallError::Class::kUnsupported,
         "torch.empty_strided does not make tensors with memory here: calls cannot run under "
         "modes that make fake tensors");
  }
  return {to_object(std::move(tensor)), found.address};
}

MadeTensor TorchFramework::empty_on_comm(const TensorSpec& spec) {
  if (!has_streams()) return empty(spec);
  struct Scope {
    Scope(const TorchFramework& of, const py::object& stream)
        : set_stream(of.of_cuda("set_stream")), caller(of.torch_stream()) {
      set_stream(stream);
    }
    ~Scope() {
      const py::error_scope kept;
      try {
        set_stream(caller);
      } catch (py::error_already_set& error) {
        error.discard_as_unraisable("the caller's stream");
      }
    }
    py::object set_stream, caller;
  } const scope(*this, comm_stream_);
  return empty(spec);
}

// ---- tensors over memory ------------------------------------------------------------------------------

py::object TorchFramework::make_over(uintptr_t address, const TensorSpec& spec, DlDataType type,
                                     std::shared_ptr<void> owner) const {
  if (api_ == nullptr) {
    return from_dlpack_(make_dlpack_capsule(address, spec, type, device_.dlpack, std::move(owner)));
  }
  auto described = ManagedTensor<DlManagedTensorVersioned>::of(address, spec, type, device_.dlpack,
                                                               std::move(owner));
  described->managed.major_version = api_->major_version;
  void* made = nullptr;
  const int status = api_->to_python(&described->managed, &made);
  // Whoever failed may have freed it or not: at worst these bytes and their owner stay.
  described.release();
  if (status != 0) throw py::error_already_set();
  return checked(static_cast<PyObject*>(made));
}

// Whether this torch makes tensors of the type out of DLPack's: tried once, without any memory.
bool TorchFramework::is_made_by_dlpack(ElementType type) const {
  std::optional<bool>& known = made_by_dlpack_[static_cast<size_t>(type.id)];
  if (known) return *known;
  const std::optional<DlDataType> code = types_.dlpack_of(type);
  bool is_made = false;
  if (code) {
    try {
      const py::object made = make_over(0, TensorSpec::of(type, {0}), *code, nullptr);
      is_made = py::object(made.attr("dtype")).ptr() == types_.dtype_of(type);
    } catch (py::error_already_set&) {
    }
  }
  known = is_made;
  return is_made;
}

Object TorchFramework::over(uintptr_t address, const TensorSpec& spec,
                            std::shared_ptr<void> owner) {
  if (is_made_by_dlpack(spec.type)) {
    return to_object(make_over(address, spec, *types_.dlpack_of(spec.type), std::move(owner)));
  }
  const py::object bytes =
      make_over(address, bytes_of(spec), *types_.dlpack_of(kUint8), std::move(owner));
  return to_object(viewed(bytes, spec, types_.dtype_of(spec.type)));
}

// ---- parts of tensors -------------------------------------------------------------------------------

py::object TorchFramework::make_range(py::handle whole, const TensorSpec& range,
                                      int64_t begin) const {
  const py::object shape = shape_of(range), strides = strides_of(range);
  if (range_directly_.is_none()) return whole.attr("as_strided")(shape, strides, begin);
  const py::int_ first(begin);
  PyObject* const arguments[] = {whole.ptr(), shape.ptr(), strides.ptr(), first.ptr()};
  return checked(PyObject_Vectorcall(range_directly_.ptr(), arguments, 4, nullptr));
}

Object TorchFramework::part(const void* tensor, const TensorSpec& spec, size_t offset) {
  const py::handle whole = borrowed(tensor);
  const TensorRef found = reader_.read(whole.ptr());
  const size_t begin = offset / found.type.num_bytes;
  const bool is_of_type = spec.type == found.type;
  const auto num_elements = static_cast<int64_t>(spec.num_bytes() / found.type.num_bytes);
  const TensorSpec range = is_of_type ? spec : TensorSpec::of(found.type, {num_elements});
  py::object made = make_range(whole, range, static_cast<int64_t>(begin));
  if (!is_of_type) {
    made = made.attr("view")(py::handle(types_.dtype_of(spec.type))).attr("view")(shape_of(spec));
  }
  return to_object(std::move(made));
}

// ---- inference mode -----------------------------------------------------------------------------------

bool TorchFramework::is_inference_mode() const { return py::cast<bool>(is_inference_mode_()); }

std::shared_ptr<void> TorchFramework::leave_inference_mode() {
  py::object scope = inference_mode_(false);
  scope.attr("__enter__")();
  return {scope.release().ptr(), [](void* left) {
            const py::error_scope kept;
            const auto scope = py::reinterpret_steal<py::object>(static_cast<PyObject*>(left));
            scope.attr("__exit__")(py::none(), py::none(), py::none());
          }};
}

}  // namespace deep_comm
