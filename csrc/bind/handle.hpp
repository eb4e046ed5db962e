// Handles of dispatches between Python and calls. A Handle of Python (deep_comm/handle.py) keeps the
// record in its attribute _record: from the dispatch, or from the first call that took its tensors.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "bind/buffer.hpp"
#include "host/calls/handle.hpp"

namespace deep_comm {

// A handle of this Buffer's tier over a record.
pybind11::object handle_of(const BoundBuffer& buffer, std::shared_ptr<DispatchRecord> record);

// What a caller gave; None: nothing. It is borrowed for the length of the call.
HandleRequest read_handle(BoundBuffer& buffer, PyObject* handle);

void bind_handle(pybind11::module_& m);

}  // namespace deep_comm
