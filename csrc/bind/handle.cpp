#include "bind/handle.hpp"

#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bind/bindings.hpp"
#include "bind/views.hpp"

namespace deep_comm {

namespace py = pybind11;

namespace {

bool is_sequence(PyObject* object) { return PyTuple_Check(object) || PyList_Check(object); }

// What a sequence of tensors, or a Handle of them, says.
class HandleReader {
 public:
  HandleReader(BoundBuffer& buffer, PyObject* handle)
      : buffer_(buffer), handle_(py::reinterpret_borrow<py::object>(handle)) {}

  std::shared_ptr<DispatchRecord> read() {
    given_.type_name = py::type::handle_of(handle_).attr("__name__").cast<std::string>();
    const bool is_handle = py::isinstance(handle_, buffer_.handle_class());
    if (is_handle) {
      read_tensors(handle_.attr("as_tuple")());
      read_fields();
    } else if (is_sequence(handle_.ptr())) {
      read_tensors(handle_);
    }
    const std::shared_ptr<DispatchRecord> record = record_of(buffer_.context, given_);
    // Such a handle may be of a dispatch with ranks that are absent now.
    const BufferToken& token = *buffer_.context.token;
    const bool has_absent = token.members.size() > static_cast<size_t>(token.num_ranks);
    if (!given_.members && has_absent) buffer_.python.require_present(sequence_[0]);
    if (is_handle) set_record(handle_, record);
    return record;
  }

 private:
  void read_tensors(const py::object& sequence) {
    sequence_ = py::tuple(sequence);
    given_.num_items = static_cast<int>(sequence_.size());
    for (const py::handle item : sequence_)
      given_.tensors.push_back(buffer_.reader.read(item.ptr()));
  }

  template <class T>
  std::optional<T> optional(const char* name) const {
    return handle_.attr(name).cast<std::optional<T>>();
  }
  TensorRef tensor(const py::object& from, const char* name) {
    kept_.push_back(from.attr(name));
    return buffer_.reader.read(kept_.back().ptr());
  }

  void read_fields() {
    given_.rank = optional<int64_t>("rank");
    given_.members = optional<std::vector<std::string>>("members");
    given_.num_experts = optional<int>("num_experts").value_or(0);
    given_.num_topk = optional<int>("num_topk").value_or(0);
    given_.owner_stream = optional<uint64_t>("owner_stream");
    const py::object expansion = handle_.attr("expansion");
    if (!expansion.is_none()) {
      given_.expansion = {tensor(expansion, "expert_offsets"),
                          tensor(expansion, "expert_counts"),
                          tensor(expansion, "recv_rows"),
                          tensor(expansion, "send_row"),
                          tensor(expansion, "num_expanded"),
                          expansion.attr("num_rows").cast<int64_t>(),
                          expansion.attr("expert_alignment").cast<int>()};
    }
    if (!buffer_.context.group.is_internode()) {
      given_.has_default_sms = handle_.attr("has_default_sms").cast<bool>();
      return;
    }
    given_.send_slots = tensor(handle_, "send_slots");
    given_.forward_slots = tensor(handle_, "forward_slots");
    given_.num_returning_rows = optional<int64_t>("num_returning_rows");
  }

  BoundBuffer& buffer_;
  py::object handle_;
  py::tuple sequence_;
  std::vector<py::object> kept_;  // that given_ refers to
  GivenHandle given_;
};

// A field of the handle that is a view of the record, by its name in deep_comm/handle.py.
py::object field_of(const DispatchRecord& record, const std::string& name) {
  const auto known = [](int64_t number) -> py::object {
    return number == 0 ? py::object(py::none()) : py::int_(number);
  };
  if (Object tensor = record.part(name)) return object_of(std::move(tensor));
  if (name == "rank") return py::int_(record.rank);
  if (name == "num_experts") return known(record.num_experts);
  if (name == "num_topk") return py::int_(record.num_topk);
  if (name == "num_recv_tokens") return py::cast(record.num_recv_tokens);
  if (name == "max_num_tokens") return py::cast(record.max_num_tokens);
  if (name == "num_returning_rows") return py::cast(record.num_returning_rows);
  if (name == "members") return py::tuple(py::cast(record.owner->members));
  if (name == "has_default_sms") return py::bool_(record.has_default_sms);
  if (name == "owner_stream") {
    if (record.held.tensors.empty()) return py::none();
    return py::cast(record.held.owner_stream);
  }
  if (record.expansion) {
    if (name == "num_rows") return py::int_(record.expansion->num_rows);
    if (name == "expert_alignment") return py::int_(record.expansion->expert_alignment);
  }
  return py::none();
}

}  // namespace

py::object handle_of(const BoundBuffer& buffer, std::shared_ptr<DispatchRecord> record) {
  return view_of(buffer.handle_class(), std::move(record));
}

HandleRequest read_handle(BoundBuffer& buffer, PyObject* handle) {
  HandleRequest request;
  request.is_given = handle != Py_None;
  const CallContext& context = buffer.context;
  if (std::shared_ptr<DispatchRecord> record = record_of_view<DispatchRecord>(handle)) {
    const bool is_of_tier = (record->owner->num_nodes > 1) == context.group.is_internode();
    if (is_of_tier && (record->owner == context.token || !record->is_given())) {
      request.record = std::move(record);
      return request;
    }
  }
  request.read = [&buffer, handle] { return HandleReader(buffer, handle).read(); };
  return request;
}

void bind_handle(py::module_& m) {
  using Record = DispatchRecord;
  py::class_<Record, std::shared_ptr<Record>>(
      m, "DispatchRecord", py::module_local(),
      "What a dispatch learned, as calls use it; see csrc/host/dispatch_record.hpp.")
      .def("field", &field_of, py::arg("name"))
      .def_property_readonly("is_expanded",
                             [](const Record& self) { return self.expansion.has_value(); })
      .def_readonly("num_channels", &Record::num_channels)
      .def_readonly("num_tokens", &Record::num_tokens)
      .def_readonly("num_recv_rows", &Record::num_recv_rows)
      .def_readonly("num_forward_rows", &Record::num_forward_rows)
      .def_readonly("num_output_rows", &Record::num_output_rows);
}

}  // namespace deep_comm
