#include "bind/buffer.hpp"

#include <pybind11/stl.h>

#include <array>
#include <string>

#include "bind/bindings.hpp"
#include "bind/doors.hpp"
#include "bind/errors.hpp"
#include "bind/interpreter.hpp"
#include "bind/views.hpp"
#include "host/calls/layout.hpp"

namespace deep_comm {

namespace py = pybind11;

namespace {

Config config_of(py::handle config) {
  const auto field = [&](const char* name) { return config.attr(name).cast<int>(); };
  return {field("num_sms"), field("num_max_nvl_chunked_send_tokens"),
          field("num_max_nvl_chunked_recv_tokens"), field("num_max_rdma_chunked_send_tokens"),
          field("num_max_rdma_chunked_recv_tokens")};
}

std::exception_ptr recorded_error(const py::object& raise_recorded) {
  try {
    raise_recorded();
    fail(CallError::Class::kGeneral, "a kernel failed and left no error record");
  } catch (...) {
    return std::current_exception();
  }
}

bool is_config(py::handle object) { return py::hasattr(object, "num_max_nvl_chunked_send_tokens"); }

}  // namespace

Config PythonChooser::choose(int64_t row_bytes) const { return config_of(chooser_(row_bytes)); }

CombineSms PythonChooser::combine_sms(int64_t row_bytes, int num_channels) const {
  const auto [most_few_rows, of_few_rows, of_more_sums] =
      chooser_.attr("combine_sms")(row_bytes, num_channels).cast<std::tuple<int, int, int>>();
  return {most_few_rows, of_few_rows, of_more_sums};
}

ConfigChoice BoundBuffer::read_config(PyObject* config, PyObject* fallback) {
  ConfigChoice choice;
  if (config != Py_None) {
    if (!is_config(config)) {
      refuse_argument("config", given_property(GivenProperty::Which::kTypeName, config),
                      "must be a Config or None");
    }
    choice.given = config_of(config);
    return choice;
  }
  if (!PyTuple_Check(fallback) || PyTuple_GET_SIZE(fallback) != 2) {
    throw py::type_error("what stands in for a Config must be a pair");
  }
  PyObject* const chosen = PyTuple_GET_ITEM(fallback, 0);
  choice.names_sms = read_flag(PyTuple_GET_ITEM(fallback, 1));
  if (is_config(chosen)) {
    choice.fallback = config_of(chosen);
    return choice;
  }
  for (const auto& known : choosers) {
    if (known->is(chosen)) choice.chooser = known.get();
  }
  if (choice.chooser == nullptr) {
    choosers.push_back(std::make_unique<PythonChooser>(py::reinterpret_borrow<py::object>(chosen)));
    choice.chooser = choosers.back().get();
  }
  return choice;
}

StreamOptions BoundBuffer::read_streams(PyObject* event, PyObject* async_finish,
                                        PyObject* on_comm) const {
  return {event == Py_None ? nullptr : event, read_flag(async_finish), read_flag(on_comm)};
}

py::object BoundBuffer::overlap_of(std::shared_ptr<Event> event) const {
  if (event == nullptr) return new_instance(python.event_overlap);
  if (!context.order.target().has_streams())
    return python.event_overlap(python.event_of(py::none()));
  return python.event_overlap(python.event_of(py::cast(std::move(event))));
}

namespace {

// (topk_idx, num_experts, previous_event, async_finish, allocate_on_comm_stream)
//   -> (per rank, per node or None, per expert, is_token_in_rank, EventOverlap)
py::object call_get_dispatch_layout(BoundBuffer& buffer, const Arguments<5>& given) {
  const auto [topk_idx, num_experts, previous_event, async_finish, on_comm] = given;
  const LayoutRequest request{buffer.reader.read(topk_idx), read_integer(num_experts),
                              buffer.read_streams(previous_event, async_finish, on_comm)};
  LayoutResult result = get_dispatch_layout(buffer.context, request);
  return py::make_tuple(object_of(std::move(result.num_tokens_per_rank)),
                        object_of(std::move(result.num_tokens_per_node)),
                        object_of(std::move(result.num_tokens_per_expert)),
                        object_of(std::move(result.is_token_in_rank)),
                        buffer.overlap_of(std::move(result.event)));
}

}  // namespace

void bind_buffer(py::module_& m) {
  using namespace pybind11::literals;
  BufferClass buffer(m, "BufferCalls", py::module_local(),
                     "The calls of one Buffer; see csrc/host/calls.");
  buffer.def(
      py::init([](const py::object& engine, std::shared_ptr<StreamOrder> order,
                  std::shared_ptr<Region> region, const py::object& device,
                  const py::object& exchange_api, uintptr_t heap_base, py::object heap_memory,
                  bool poisons, int rank, int num_ranks, int num_nodes, int ranks_per_node,
                  int num_max_experts, size_t num_nvl_bytes, size_t num_ring_bytes,
                  size_t num_rdma_bytes, std::optional<int> max_sms, bool rail_reads_late,
                  py::object raise_recorded, py::object event_overlap, py::object event_of,
                  py::object handle_class, py::object tier_handle_class,
                  py::object require_present) {
        Memory memory(order, heap_base, owner_of(std::move(heap_memory)), std::move(region),
                      poisons);
        auto made = std::make_shared<BoundBuffer>(
            std::vector<py::object>{engine},
            PythonParts{raise_recorded, std::move(event_overlap), std::move(event_of),
                        std::move(handle_class), std::move(tier_handle_class),
                        std::move(require_present)},
            TensorReader(device, exchange_api),
            GroupShape{rank, num_ranks, num_nodes, ranks_per_node, num_max_experts},
            *behind<EngineCalls>(engine), std::move(order), std::move(memory),
            RingResources{num_nvl_bytes, num_ring_bytes, num_rdma_bytes, max_sms},
            py::str(device).cast<std::string>());
        made->context.rail_reads.are_late = rail_reads_late;
        made->context.recorded_error = [raise_recorded] { return recorded_error(raise_recorded); };
        return made;
      }),
      py::kw_only(), "engine"_a, "order"_a, "region"_a, "device"_a, "exchange_api"_a, "heap_base"_a,
      "heap_memory"_a, "poisons"_a, "rank"_a, "num_ranks"_a, "num_nodes"_a, "ranks_per_node"_a,
      "num_max_experts"_a, "num_nvl_bytes"_a, "num_ring_bytes"_a, "num_rdma_bytes"_a, "max_sms"_a,
      "rail_reads_late"_a, "raise_recorded"_a, "event_overlap"_a, "event_of"_a, "handle_class"_a,
      "tier_handle_class"_a, "require_present"_a);
  buffer.def(
      "set_absent",
      [](BoundBuffer& self, std::vector<int> ranks) { self.context.absent = std::move(ranks); },
      "ranks"_a, "Ranks that the Buffer does without, in ascending order.");
  buffer.def(
      "begin_reset", [](BoundBuffer& self) { self.context.begin_reset(); },
      "Raises BufferInUse while another thread is in a call, or a signal handler interrupts one. "
      "Then no call begins until end_reset.");
  buffer.def(
      "require_no_call", [](const BoundBuffer& self) { self.context.require_no_call(); },
      "Raises BufferInUse as begin_reset.");
  buffer.def_property_readonly("is_in_use",
                               [](const BoundBuffer& self) { return self.context.is_in_use(); });
  buffer.def("end_reset", [](BoundBuffer& self) { self.context.end_reset(); });
  buffer.def(
      "close",
      [](BoundBuffer& self, bool may_be_in_use) {
        if (!may_be_in_use) self.context.require_no_call();
        self.context.close();
      },
      py::kw_only(), "may_be_in_use"_a,
      "No call begins any more. Raises BufferInUse as begin_reset, unless may_be_in_use.");
  def_call<&call_get_dispatch_layout>(buffer, "get_dispatch_layout");
  bind_normal_calls(m, buffer);
  bind_tp_calls(buffer);
}

}  // namespace deep_comm
