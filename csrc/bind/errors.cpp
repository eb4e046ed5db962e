#include "bind/errors.hpp"

#include <exception>
#include <string>
#include <variant>

#include "bind/interrupts.hpp"
#include "host/require.hpp"

namespace py = pybind11;

namespace deep_comm {

namespace {

py::object shown(const GivenProperty& given) {
  using Which = GivenProperty::Which;
  auto* pointer = static_cast<PyObject*>(given.object.get());
  const auto object = py::reinterpret_borrow<py::object>(pointer == nullptr ? Py_None : pointer);
  const auto type_name = [&] { return py::type::handle_of(object).attr("__name__"); };
  switch (given.which) {
    case Which::kValue:
      return object;
    case Which::kTypeName:
      return type_name();
    case Which::kReprAndType:
      return py::str("{!r} of type {}").format(object, type_name());
    case Which::kDevice:
      return object.attr("device");
    case Which::kType:
      return object.attr("dtype");
    case Which::kShape:
      return py::list(object.attr("shape"));
    case Which::kShapeAndType:
      return py::str("{} of {}").format(py::list(object.attr("shape")), object.attr("dtype"));
    case Which::kTypeShapeDevice:
      return py::str("{} {} on {}")
          .format(object.attr("dtype"), py::list(object.attr("shape")), object.attr("device"));
  }
  return py::none();
}

py::object shown(const GivenValue& given) {
  struct Visitor {
    py::object operator()(std::monostate) const { return py::none(); }
    py::object operator()(bool value) const { return py::bool_(value); }
    py::object operator()(int64_t value) const { return py::int_(value); }
    py::object operator()(const std::string& value) const { return py::str(value); }
    py::object operator()(const GivenProperty& value) const { return shown(value); }
  };
  return std::visit(Visitor(), given);
}

const char* name_of(CallError::Class error_class) {
  using Class = CallError::Class;
  switch (error_class) {
    case Class::kArgument:
      return "ArgumentError";
    case Class::kHandleMismatch:
      return "HandleMismatch";
    case Class::kBufferTooSmall:
      return "BufferTooSmall";
    case Class::kUnsupported:
      return "UnsupportedError";
    case Class::kBufferInUse:
      return "BufferInUse";
    case Class::kBufferDestroyed:
      return "BufferDestroyed";
    case Class::kCallInterrupted:
      return "CallInterrupted";
    case Class::kGeneral:
    case Class::kRecorded:
      break;
  }
  return "DeepCommError";
}

py::object exception_of(const CallError& error) {
  using Class = CallError::Class;
  const py::object type = py::module_::import("deep_comm.errors").attr(name_of(error.error_class));
  switch (error.error_class) {
    case Class::kArgument:
    case Class::kHandleMismatch:
      return type(error.argument, shown(error.value), error.rule);
    case Class::kBufferTooSmall:  // whose text says `rule` as what the bytes are for
      return type(shown(error.value), error.needed_bytes, error.rule, error.argument);
    case Class::kCallInterrupted:
      return type(shown(error.value));
    default:
      return type(error.rule);
  }
}

// Raises, one way or another.
void raise(const CallError& error, PyObject* raise_recorded) {
  if (error.error_class == CallError::Class::kRecorded && raise_recorded != nullptr) {
    py::reinterpret_borrow<py::function>(raise_recorded)();  // returns if nothing is recorded
  }
  const py::object exception = exception_of(error);
  PyErr_SetObject(py::type::handle_of(exception).ptr(), exception.ptr());
}

// Unlike restore() it may be called again: an error that is kept is raised by every call for it.
void set_again(const py::error_already_set& error) {
  PyErr_Restore(py::object(error.type()).release().ptr(), py::object(error.value()).release().ptr(),
                py::object(error.trace()).release().ptr());
}

}  // namespace

void set_python_error(PyObject* raise_recorded) noexcept {
  try {
    try {
      throw;
    } catch (const CallError& error) {
      raise(error, raise_recorded);
    } catch (const detail::PythonInterrupted& interrupted) {
      set_again(interrupted.error);
    }
  } catch (const py::error_already_set& error) {  // the first one's, or of what looked at it
    set_again(error);
  } catch (...) {
    py::detail::try_translate_exceptions();  // as after functions of pybind11's
  }
}

}  // namespace deep_comm
