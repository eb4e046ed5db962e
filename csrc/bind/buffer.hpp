// A Buffer's calls as Python knows them: _core.BufferCalls. What a call is given is read here, its
// results become Python's objects here; what it does is in host/calls.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <utility>
#include <vector>

#include "bind/function.hpp"
#include "bind/torch/framework.hpp"
#include "bind/torch/reader.hpp"
#include "host/calls/dispatch.hpp"

namespace deep_comm {

// Classes and functions of the package that calls need. Given once a Buffer, since this module does not
// import the package.
struct PythonParts {
  pybind11::object raise_recorded;                   // () raises what a kernel has recorded
  pybind11::object event_overlap;                    // EventOverlap(event: EventHandle | None)
  pybind11::object event_of;                         // EventHandle.of(Event | None)
  pybind11::object handle_class, tier_handle_class;  // Handle, InternodeHandle
  // (first tensor of a handle) raises if rows of it go to absent ranks
  pybind11::object require_present;
};

// A DefaultConfig of deep_comm/tuning.py.
class PythonChooser final : public ConfigChooser {
 public:
  explicit PythonChooser(pybind11::object chooser) : chooser_(std::move(chooser)) {}
  Config choose(int64_t row_bytes) const override;
  CombineSms combine_sms(int64_t row_bytes, int num_channels) const override;
  bool is(pybind11::handle other) const { return chooser_.is(other); }

 private:
  pybind11::object chooser_;
};

struct BoundBuffer : std::enable_shared_from_this<BoundBuffer> {
  template <class... ContextArguments>
  BoundBuffer(std::vector<pybind11::object> kept, PythonParts python, TensorReader reader,
              ContextArguments&&... arguments)
      : kept(std::move(kept)),
        python(std::move(python)),
        reader(std::move(reader)),
        context(std::forward<ContextArguments>(arguments)...) {}

  // What the context refers to lives as long: members end in reverse order.
  std::vector<pybind11::object> kept;
  PythonParts python;
  TensorReader reader;
  std::vector<std::unique_ptr<PythonChooser>> choosers;  // a handful; their addresses stay
  CallContext context;

  // ---- arguments (borrowed)
  // deep_comm.Config, or None; throws CallError for anything else. `fallback`: what stands in for
  // None: (a Config or a DefaultConfig, has somebody named a number of SMs?).
  ConfigChoice read_config(PyObject* config, PyObject* fallback);
  // `event`: EventHandle, or None.
  StreamOptions read_streams(PyObject* event, PyObject* async_finish, PyObject* on_comm) const;

  // ---- results
  // EventOverlap of a call; null: of a synchronous one.
  pybind11::object overlap_of(std::shared_ptr<Event> event) const;
  // Of handles of this Buffer's tier.
  const pybind11::object& handle_class() const {
    return context.group.is_internode() ? python.tier_handle_class : python.handle_class;
  }
};

using BufferClass = pybind11::class_<BoundBuffer, std::shared_ptr<BoundBuffer>>;

// The calls of BufferCalls, each in the file of its name.
void bind_normal_calls(pybind11::module_& m, BufferClass& buffer);
void bind_tp_calls(BufferClass& buffer);

pybind11::object list_of(const std::vector<int>& numbers);

// Of a member of CallContext's results: None where there is none.
inline pybind11::object object_of(Object object) {
  if (!object) return pybind11::none();
  return pybind11::reinterpret_steal<pybind11::object>(static_cast<PyObject*>(object.take()));
}

inline CallContext::InCall enter_call(BoundBuffer& self) {
  return CallContext::InCall(self.context);
}
inline const pybind11::object& raise_recorded_of(const BoundBuffer& self) {
  return self.python.raise_recorded;
}
// Of what has calls of its own over a Buffer.
template <class Calls>
const pybind11::object& raise_recorded_of(const Calls& self) {
  return self.buffer->python.raise_recorded;
}

// A property of the bound class: the function of Python's that makes a call, see method_function. Ask
// for it once.
template <auto kMethod, class Class>
void def_call(Class& calls, const char* name) {
  using Self = typename Class::type;
  calls.def_property_readonly(name, [name](const std::shared_ptr<Self>& self) {
    return method_function<kMethod>(name, self, raise_recorded_of(*self));
  });
}

}  // namespace deep_comm
