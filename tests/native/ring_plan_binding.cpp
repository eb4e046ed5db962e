// plan_channels as tests/cpu/host/test_config.py uses it: a slot of a channel's ring has 100 bytes.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>

#include "bind/errors.hpp"
#include "host/ring_plan.hpp"

namespace py = pybind11;

namespace deep_comm::test {

namespace {

// (channels, tokens between two publications, slots).
py::object plan(int num_sms, int nvl_send_tokens, int nvl_recv_tokens, bool is_given,
                int num_channels, size_t num_nvl_bytes, size_t num_ring_bytes,
                std::optional<int> max_sms) {
  const Config config = {num_sms, nvl_send_tokens, nvl_recv_tokens};
  const RingResources resources = {num_nvl_bytes, num_ring_bytes, 0, max_sms};
  PyObject* made = translate(nullptr, [&]() -> py::object {
    const ChannelConfig rings = plan_channels(
        config, is_given, num_channels, resources,
        [](int channels, int slots) { return static_cast<size_t>(100) * channels * slots; });
    return py::make_tuple(rings.num_channels, rings.num_send_tokens, rings.num_slots);
  });
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

}  // namespace

void bind_ring_plan(py::module_& m) {
  using namespace pybind11::literals;
  m.def("plan_channels", &plan, "num_sms"_a, "nvl_send_tokens"_a, "nvl_recv_tokens"_a, "is_given"_a,
        "num_channels"_a, "num_nvl_bytes"_a, "num_ring_bytes"_a, "max_sms"_a);
}

}  // namespace deep_comm::test
